"""Meshes of several axes: where the state lies, one device's numbers, what they refuse, and their checkpoints."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import trainer
from tests.support.networks import classification, logits_loss
from trainer import distribute
from trainer.core.compile.traces.named_axes import named_axes
from trainer.core.tree_paths import named_leaves
from trainer.distribute import FullyShardedStrategy, ModelParallelStrategy
from trainer.testing import assert_strategies_equal

LAYOUT = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
X, Y, _ = classification(16, 8, 4)


def devices(count):
    return [f"cpu:{index}" for index in range(count)]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="down")(nn.tanh(nn.Dense(32, name="up")(x)))


def compiled(module, **options):
    model = trainer.Model(module)
    model.compile(optax.sgd(0.1, momentum=0.9), logits_loss(), **options)
    return model


# --- where the state lies ---------------------------------------------------------------------------------------------

# Bytes of up/kernel (8, 32), up/bias (32,), down/kernel (32, 4), down/bias (4,) on a device, and their specs.
MESHES = {
    "hybrid": (lambda: FullyShardedStrategy(devices(8), mesh_shape={"replica": 2, "shard": 4}, min_shard_bytes=0),
               (1024 / 4, 128 / 4, 512 / 4, 16 / 4), ((None, "shard"), ("shard",), ("shard",), ("shard",))),
    "small arrays stay whole": (
        lambda: FullyShardedStrategy(devices(8), mesh_shape={"replica": 2, "shard": 4}, min_shard_bytes=513),
        (1024 / 4, 128, 512, 16), ((None, "shard"), (), (), ())),
    "layouts": (lambda: ModelParallelStrategy({"replica": 2, "shard": 2, "model": 2}, devices(8), LAYOUT,
                                              min_shard_bytes=0),
                (1024 / 4, 128 / 2, 512 / 4, 16 / 2), (("shard", "model"), ("shard",), ("model", "shard"), ("shard",))),
    "two axes on one": (
        lambda: ModelParallelStrategy({"shard": 2, "model": 2, "stage": 2}, devices(8), {
            "up/kernel": (None, ("model", "stage")), "down/kernel": ("model",)}, min_shard_bytes=0),
        (1024 / 8, 128 / 2, 512 / 4, 16 / 2), (("shard", ("model", "stage")), ("shard",), ("model", "shard"),
                                               ("shard",))),
    "no replicas": (lambda: ModelParallelStrategy({"shard": 8}, devices(8), min_shard_bytes=0),
                    (1024 / 8, 128 / 8, 512 / 8, 16), ((None, "shard"), ("shard",), ("shard",), ())),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_device_has_the_bytes_that_are_computed_by_hand(name):
    make, expected, specs = MESHES[name]
    strategy, model = make(), compiled(Block())
    with contextlib.redirect_stdout(None):
        report = strategy.explain(model, X)
    rows = {row.path: row for row in report.rows}
    paths = ("up/kernel", "up/bias", "down/kernel", "down/bias")
    assert [rows[path].device_bytes for path in paths] == list(expected)
    assert report.parameter_bytes == report.gradient_bytes == sum(expected)
    assert report.optimizer_bytes - sum(expected) <= 16  # momentum, a learning rate, and no more
    state = model.state_shapes(X)
    found = named_leaves(strategy.state_shardings(state).params)
    for path, spec in zip(paths, specs, strict=True):
        assert found[path].is_equivalent_to(NamedSharding(strategy.mesh, P(*spec)), len(rows[path].shape)), path


def test_replicas_are_on_other_hosts_however_the_mesh_is_written():
    strategy = ModelParallelStrategy({"model": 2, "shard": 2, "replica": 2}, devices(8), LAYOUT)
    assert dict(strategy.mesh.shape) == {"replica": 2, "model": 2, "shard": 2}
    assert [device.id for device in strategy.mesh.devices[0].flat] == [0, 1, 2, 3]
    assert strategy.num_replicas_in_sync == 4
    hybrid = FullyShardedStrategy(devices(8), mesh_shape={"shard": 4, "replica": 2})
    assert repr(hybrid) == "FullyShardedStrategy({'replica': 2, 'shard': 4})"


def test_over_other_devices_the_number_of_replicas_changes_alone():
    here = jax.local_devices()
    hybrid = FullyShardedStrategy(here[:4], mesh_shape={"replica": 2, "shard": 2}).over(here)
    assert dict(hybrid.mesh.shape) == {"replica": 4, "shard": 2} and hybrid._rule.num_shards == 2
    with pytest.raises(ValueError, match=r"FullyShardedStrategy\(\{'replica': 4, 'shard': 2\}\) has 2 devices in each"):
        hybrid.over(here[:3])


# --- numbers ----------------------------------------------------------------------------------------------------------


class OwnStep(trainer.Model):
    def train_step(self, state, batch):
        return super().train_step(state, batch)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [trainer.Model, OwnStep])  # replicated and partitioned
@pytest.mark.parametrize("name", ["hybrid", "layouts", "two axes on one"])
def test_a_mesh_gives_one_devices_numbers(name, kind):
    def build():
        model = kind(Block())
        model.compile(optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9)), logits_loss())
        return model

    strategy = MESHES[name][0]()
    with strategy.scope(), contextlib.redirect_stdout(None):
        report = strategy.explain(build(), batch=(X, Y))
    assert (report.partitioned_because is None) == (kind is trainer.Model)
    assert_strategies_equal(build, (X, Y), [strategy], batch_size=8, evaluate=True, predict=True)


@pytest.mark.slow
def test_loops_of_ones_own_run_on_all_replicas_of_a_mesh():
    strategy = FullyShardedStrategy(devices(4), mesh_shape={"replica": 2, "shard": 2}, min_shard_bytes=0)
    ids = strategy.run(lambda: distribute.get_replica_context().replica_id_in_sync_group)
    assert [int(each) for each in strategy.experimental_local_results(ids)] == [0, 1, 2, 3]

    def step(state, batch):
        context = distribute.get_replica_context()
        assert (context.num_replicas_in_sync, len(batch)) == (4, 4)
        return state.apply_gradients(jax.grad(lambda params: sum(map(jnp.sum, jax.tree.leaves(params))))(state.params))

    with strategy.scope():
        model = compiled(Block())
        model.build(X)
        before = model.get_weights()
        batches = strategy.experimental_distribute_dataset(trainer.data.Dataset.from_arrays(X).batch(16))
        model.state = strategy.run(step, (model.state, next(iter(batches))))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one - 0.1, rtol=1e-5, atol=1e-6)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        weights = self.param("weights", nn.initializers.lecun_normal(), (11, 8))

        def step(carry, x):
            return jnp.tanh(jnp.concatenate([carry, x], -1) @ weights), None

        return nn.Dense(4, name="last")(jax.lax.scan(step, jnp.zeros((len(x), 8)), x.swapaxes(0, 1))[0])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("gathers_first", [True, False])
def test_xla_alone_computes_other_numbers_for_a_recurrent_layer_over_three_axes(gathers_first, monkeypatch):
    def build():
        model = OwnStep(Recurrent())
        model.compile("sgd", logits_loss())
        return model

    strategy = ModelParallelStrategy({"replica": 2, "shard": 2, "model": 2}, devices(8), {"last/kernel": ("model",)},
                                     min_shard_bytes=0)
    if not gathers_first:
        monkeypatch.setattr(strategy, "with_params_in_place", lambda state: state)
    series = np.random.default_rng(0).normal(size=(16, 4, 3)).astype(np.float32)
    differs = pytest.raises(AssertionError, match="does not give the numbers")
    with contextlib.nullcontext() if gathers_first else differs:
        assert_strategies_equal(build, (series, Y), [strategy], batch_size=8)


TOKENS = np.random.default_rng(0).integers(1, 20, (8, 8))
RULES = (("batch", ("replica", "shard")), ("tokens", "sequence"))


class Text(nn.Module):
    """A transformer layer whose activations are split by tokens, but for keys and values."""

    constrain: str = "lax"

    def along(self, x):
        if self.constrain == "lax":
            return jax.lax.with_sharding_constraint(x, P(None, "sequence", None))
        mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("replica", "shard", "sequence"))
        return nn.with_logical_constraint(x, ("batch", "tokens", None), rules=RULES, mesh=mesh)

    @nn.compact
    def __call__(self, x):
        x = self.along(nn.Embed(20, 16)(x))
        x = self.along(x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x)))
        x = self.along(x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))))
        return nn.Dense(4)(x.mean(1))


SEQUENCES = {
    "replicas": lambda: ModelParallelStrategy({"replica": 2, "sequence": 2}, devices(4)),
    "shards": lambda: ModelParallelStrategy({"replica": 2, "shard": 2, "sequence": 2}, devices(8), min_shard_bytes=0),
    "sequences alone": lambda: ModelParallelStrategy({"sequence": 4}, devices(4)),
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [trainer.Model, OwnStep])
@pytest.mark.parametrize(("mesh", "constrain"), [
    ("replicas", "lax"), ("shards", "lax"), ("shards", "logical"), ("sequences alone", "lax")])
def test_tokens_over_a_sequence_axis_give_one_devices_numbers(mesh, constrain, kind):
    def build():
        model = kind(Text(constrain))
        model.compile(optax.sgd(0.1, momentum=0.9), logits_loss(), steps_per_execution=1)
        return model

    assert_strategies_equal(build, (TOKENS, TOKENS[:, 0] % 4), [SEQUENCES[mesh]()], batch_size=4, epochs=2,
                            evaluate=False, predict=True)


@pytest.mark.slow
def test_a_device_computes_its_tokens_alone():
    strategy = SEQUENCES["replicas"]()
    with strategy.scope():
        model = compiled(Text(), steps_per_execution=1)
    with contextlib.redirect_stdout(None):
        split = strategy.explain(model, batch=(TOKENS, TOKENS[:, 0] % 4))
        whole = distribute.MirroredStrategy(devices(2)).explain(model, batch=(TOKENS, TOKENS[:, 0] % 4))
    assert split.partitioned_because is whole.partitioned_because is None
    assert split.temporary_bytes < whole.temporary_bytes


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: FullyShardedStrategy(devices(8), mesh_shape={"replica": 2, "shard": 3}), ValueError,
     "`mesh_shape` {'replica': 2, 'shard': 3} has 6 places, but there are 8 devices. Expected: one device for each"),
    (lambda: FullyShardedStrategy(devices(4), mesh_shape={"replica": 2, "model": 2}), ValueError,
     "has the axes 'replica' and 'shard'. Received: {'replica': 2, 'model': 2}. For axes that a layout or a module "
     "names, use `ModelParallelStrategy(mesh_shape, layout_map=...)`"),
    (lambda: FullyShardedStrategy(devices(4), mesh_shape={"replica": 4}), ValueError, "Received: {'replica': 4}."),
    (lambda: FullyShardedStrategy(devices(4), mesh_shape=[2, 2]), TypeError,
     '`mesh_shape` must be a dict such as {"replica": 2, "shard": 4}'),
    (lambda: FullyShardedStrategy(devices(4), mesh_shape={"replica": 2, "shard": 0}), ValueError,
     "`mesh_shape['shard']` must be"),
    (lambda: ModelParallelStrategy({"shard": 4, 2: 1}, devices(4)), TypeError, "a dict whose keys are the names of"),
    (lambda: ModelParallelStrategy({"shard": 4}, devices(4), min_shard_bytes=-1), ValueError, "`min_shard_bytes`"),
    (lambda: ModelParallelStrategy({"shard": 2, "model": 2}, devices(4), {"up/kernel": ("shard",)}).explain(
        compiled(Block()), X), ValueError,
     "'shard' splits batches, and parameters by their shapes: along an axis that the layout leaves. Use 'model'."),
    (lambda: ModelParallelStrategy({"shard": 2, "model": 2}, devices(4), {"up/kernel": ("modle",)}).explain(
        compiled(Block()), X), ValueError, "the mesh has no axis 'modle'. Did you mean 'model'?"),
])
def test_what_is_no_mesh_for_a_strategy_is_refused_with_the_fix(make, error, message):
    with contextlib.redirect_stdout(None), pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("kind", [trainer.Model, OwnStep])
def test_an_axis_that_nothing_names_is_refused_before_a_step_is_compiled(kind, monkeypatch):
    monkeypatch.setattr("trainer.engine.step.compiled_phase.compile_lowered",
                        lambda *args: pytest.fail("it is compiled"))
    with ModelParallelStrategy({"replica": 2, "model": 2, "sequence": 2}, devices(8), LAYOUT).scope():
        model = kind(Block())
        model.compile("sgd", logits_loss())
    with pytest.raises(ValueError, match=re.escape(
            "`mesh_shape` {'replica': 2, 'model': 2, 'sequence': 2} has the axis 'sequence', of 2 devices, which "
            "splits nothing: no layout and no annotation of a parameter names it, and no sharding constraint of the "
            "module.")
            + ".*a mesh without this axis, such as {'replica': 4, 'model': 2}"):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_the_axes_that_a_program_names_are_found_in_its_loops_and_maps():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("replica", "model", "sequence"))

    def body(carry, _):
        return jax.lax.with_sharding_constraint(carry + 1, NamedSharding(mesh, P(None, ("replica", "model")))), None

    assert named_axes(jax.make_jaxpr(lambda x: jax.lax.scan(body, x, length=2))(X)) == {"replica", "model"}
    mapped = jax.shard_map(lambda x: jax.lax.ppermute(x, "sequence", [(0, 1), (1, 0)]), mesh=mesh, in_specs=P(),
                           out_specs=P(), check_vma=False)
    assert named_axes(jax.make_jaxpr(mapped)(X)) == {"sequence"}
    assert named_axes(jax.make_jaxpr(jnp.sum)(X)) == set()


# --- checkpoints ------------------------------------------------------------------------------------------------------

RESTORED = {
    "hybrid": MESHES["hybrid"][0], "layouts": MESHES["layouts"][0], "no replicas": MESHES["no replicas"][0],
    "one device": lambda: distribute.OneDeviceStrategy("cpu:2"),
    "other size": lambda: ModelParallelStrategy({"shard": 3, "model": 2}, devices(6), LAYOUT, min_shard_bytes=0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [
    ("hybrid", "layouts"), ("layouts", "no replicas"), ("layouts", "one device"), ("one device", "hybrid"),
    ("no replicas", "other size")])
def test_a_model_that_was_saved_on_a_mesh_has_the_same_bits_on_another(before, after, tmp_path):
    first, second = RESTORED[before](), RESTORED[after]()
    with first.scope():
        model = compiled(Block())
    model.fit(X, Y, batch_size=16, verbose=0)
    model.save(tmp_path / "model")
    with second.scope():
        loaded = trainer.load(tmp_path / "model", compiled(Block()))
    expected, found = named_leaves(model.state), named_leaves(loaded.state)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert leaf.sharding.device_set == set(second.mesh.devices.flat), path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[path]), err_msg=path)
    loaded.fit(X, Y, batch_size=16, verbose=0)
    model.fit(X, Y, batch_size=16, verbose=0)
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
