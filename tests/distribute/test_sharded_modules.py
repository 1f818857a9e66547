"""Modules that say how arrays are split: their annotations become layouts, their constraints hold or are ignored."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.lax import with_sharding_constraint as constraint_under_another_name
from jax.sharding import AxisType, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

import trainer
from trainer import distribute
from trainer.core.ambient.workarounds import SWITCH
from trainer.core.compile.constraints import constraints_by, over_axes
from trainer.core.tree_paths import named_leaves

X = np.random.default_rng(0).normal(size=(14, 6)).astype(np.float32)
MESH = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))
INIT = nn.initializers.lecun_normal()


def one_device():
    return distribute.OneDeviceStrategy("cpu:3")


def mirrored():
    return distribute.MirroredStrategy(jax.devices()[:4])


def model_parallel(layout_map=None):
    return distribute.ModelParallelStrategy({"replica": 2, "model": 2}, jax.devices()[:4], layout_map)


CONSTRAINTS = {
    "a sharding of the script's mesh": lambda h: jax.lax.with_sharding_constraint(
        h, NamedSharding(MESH, P("data", "model"))),
    "a spec": lambda h: jax.lax.with_sharding_constraint(h, P(None, "model")),
    "a spec with the replicas' axis": lambda h: jax.lax.with_sharding_constraint(h, P("replica", "model")),
    "logical names": lambda h: nn.with_logical_constraint(h, ("batch", "mlp"), rules=RULES, mesh=MESH),
    "reshard": lambda h: jax.sharding.reshard(h, P("data", "model")),
    "auto_axes": lambda h: auto_axes(jnp.copy, out_sharding=P("data", "model"))(h),
    "a tree": lambda h: jax.lax.with_sharding_constraint({"h": h}, {"h": P(None, ("model", "data"))})["h"],
}


class Constrained(nn.Module):
    constraints: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8, kernel_init=nn.with_partitioning(INIT, (None, "model"), mesh=MESH))(x)
        for name in self.constraints:
            h = CONSTRAINTS[name](h)
        if self.constraints:
            h = auto_axes(jnp.copy, out_sharding=jax.typeof(h).sharding)(h)
        return nn.Dense(6, kernel_init=nn.with_logical_partitioning(INIT, ("mlp", "embed"), rules=RULES))(nn.relu(h))


class Annotated(nnx.Module):
    def __init__(self, rngs):
        with nnx.use_eager_sharding(False):
            self.up = nnx.Linear(6, 8, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")})
            self.down = nnx.Linear(8, 6, rngs=rngs, kernel_init=nnx.with_partitioning(INIT, ("model", None)))

    def __call__(self, x):
        return self.down(nnx.relu(jax.lax.with_sharding_constraint(self.up(x), P("replica", "model"))))


def model_of(module, strategy):
    with strategy.scope():
        model = trainer.Model(module)
        model.compile("adam", "mse")
    return model


def specs_of(model):
    model.build(X)
    return {path: tuple(leaf.sharding.spec) for path, leaf in named_leaves(
        model.state.params).items() if any(leaf.sharding.spec)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [one_device, model_parallel])
def test_constraints_change_no_number(strategy):
    plain, constrained = (
        model_of(Constrained(names), strategy()).fit(X, X, batch_size=8, shuffle=False, verbose=0).history["loss"]
        for names in ((), tuple(CONSTRAINTS)))
    np.testing.assert_allclose(constrained, plain, rtol=1e-5)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_over_an_axis_of_the_strategy_is_honoured(name):
    strategy = model_parallel()
    on_replicas = strategy.map_over_replicas(CONSTRAINTS[name], (P("replica"),), lambda outputs: P("replica"))
    assert "spec=P(None, 'model')" in str(jax.make_jaxpr(on_replicas)(jnp.ones((8, 8))))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [mirrored, lambda: distribute.FullyShardedStrategy(jax.devices()[:2])])
def test_constraints_are_ignored_where_each_replica_is_one_device(strategy):
    constrained, plain = (model_of(Constrained(names), strategy()).fit(X, X, batch_size=8, verbose=0).history["loss"]
                          for names in (tuple(CONSTRAINTS), ()))
    np.testing.assert_allclose(constrained, plain, rtol=1e-5)


@pytest.mark.parametrize(("name", "error"), [
    ("a spec with the replicas' axis", "can only refer to Auto axes"), ("reshard", "is not found in mesh"),
    ("auto_axes", "is not allowed"), ("a tree", "is not found in mesh")])
def test_jax_still_refuses_other_meshes_and_the_workaround_can_be_turned_off(name, error, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    on_replicas = model_parallel().map_over_replicas(CONSTRAINTS[name], (P("replica"),), lambda outputs: P("replica"))
    with pytest.raises((ValueError, NotImplementedError), match=error):
        jax.make_jaxpr(on_replicas)(jnp.ones((8, 8)))


def test_a_constraint_over_the_rows_alone_is_what_replicas_do():
    strategy = mirrored()
    doubled = strategy.run(lambda: jax.lax.with_sharding_constraint(2 * jnp.ones(4), P("replica")))
    assert strategy.reduce("sum", doubled).tolist() == [8.0] * 4


def test_functions_of_jax_are_replaced_in_steps_of_this_thread_alone_whoever_imported_them():
    constrain, original = over_axes(["model"]), jax.lax.with_sharding_constraint
    x, here = jnp.ones((4, 4)), NamedSharding(MESH, P("data"))
    found = []
    thread = threading.Thread(target=lambda: found.append(jax.lax.with_sharding_constraint(x, here).sharding))
    with constraints_by(constrain):
        assert constraint_under_another_name is original  # only under its own name
        assert jax.lax.with_sharding_constraint is not original
        assert auto_axes is jax.sharding.auto_axes  # of this file
        thread.start()
        thread.join()
    assert found == [here]
    assert jax.lax.with_sharding_constraint is original


@pytest.mark.slow
def test_annotations_become_layouts_and_rules_go_before_them():
    assert specs_of(model_of(Constrained(), model_parallel())) == {
        "Dense_0/kernel": (None, "model"), "Dense_1/kernel": ("model", None)}
    assert specs_of(model_of(Constrained(), model_parallel({"Dense_0/kernel": ("model", None)}))) == {
        "Dense_0/kernel": ("model", None), "Dense_1/kernel": ("model", None)}
    assert specs_of(model_of(Constrained(), one_device())) == specs_of(model_of(Constrained(), mirrored())) == {}


@pytest.mark.slow
def test_metadata_of_nnx_variables_become_layouts():
    module = Annotated(nnx.Rngs(0))
    with nn.logical_axis_rules(RULES):
        model = model_of(module, model_parallel())
        assert specs_of(model) == {"down/kernel": ("model", None), "up/kernel": (None, "model")}
    moments = [leaf.sharding.spec for leaf in jax.tree.leaves(model.state.opt_state) if leaf.ndim == 2]
    assert sorted(map(str, moments)) == sorted(map(str, [P(None, "model"), P("model", None)] * 2))
    expected = model_of(module, one_device()).evaluate(X, X, verbose=0)["loss"]
    np.testing.assert_allclose(model.evaluate(X, X, verbose=0)["loss"], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("names", "problem"), [
    ((None, "modle"), "the mesh has no axis 'modle'. Did you mean 'model'"),
    (("replica", None), "'replica' is the axis that splits batches"),
    (("model", "model"), "names the axis 'model' more than once"),
])
def test_an_annotation_that_does_not_fit_the_mesh_is_refused(names, problem):
    layer = nn.Dense(8, kernel_init=nn.with_partitioning(INIT, names))
    with pytest.raises(ValueError, match=f"annotation .* cannot split .* 'kernel' .*{problem}.*`layout_map`"):
        model_of(layer, model_parallel()).build(X)
    assert model_of(layer, model_parallel({"kernel": ()})).state_shapes(X).params["kernel"].shape == (6, 8)
    assert specs_of(model_of(layer, one_device())) == {}
