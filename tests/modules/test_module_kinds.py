"""What is particular to NNX objects, stacks of layers, named modules and replicas."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tests.support.module_cases import LinenNet, NNXNet, X, close, key_maker, no_keys
from tests.support.simulated_replicas import run_replicas
from trainer.core.modules import as_functional
from trainer.core.replica_context import get_replica_context

# NNX: values, sharing and what becomes of the user's object.

@pytest.mark.slow
def test_nnx_starts_from_the_users_values_and_never_aliases_them():
    module = NNXNet(nnx.Rngs(0))
    module.dense.kernel[...] = jnp.full((3, 4), 2.0)
    params, _, _ = as_functional(module).init(jax.random.key(1), X)
    np.testing.assert_array_equal(params["dense"]["kernel"], 2.0)
    params["dense"]["kernel"].delete()
    np.testing.assert_array_equal(module.dense.kernel[...], 2.0)


@pytest.mark.slow
def test_the_users_nnx_object_changes_only_by_absorb():
    module = NNXNet(nnx.Rngs(0))
    module.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    functional = as_functional(module)
    params, model_state, _ = functional.init(jax.random.key(0), X)
    _, new_state = functional.apply(params, model_state, X, training=True, make_key=key_maker())
    close(nnx.to_pure_dict(nnx.state(module, nnx.Param)), before)
    np.testing.assert_array_equal(module.norm.mean[...], 0)
    assert type(module.norm) is nnx.BatchNorm
    assert module.dropout.deterministic

    shifted = jax.tree.map(lambda leaf: leaf + 1, params)
    functional.absorb(shifted, new_state)
    close(module.dense.kernel[...], before["dense"]["kernel"] + 1)
    close(module.norm.mean[...], new_state["norm"]["mean"])
    close(module(X), functional.apply(shifted, new_state, X, training=False, make_key=key_maker())[0])
    jax.tree.map(lambda leaf: leaf.delete(), shifted)
    assert np.isfinite(module.dense.kernel[...]).all()
    assert module.dropout.deterministic
    assert type(module.norm) is nnx.BatchNorm


class NNXOddities(nnx.Module):
    """A shared parameter, a plain array, a variable of the user's own, a list, a sown value."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = nnx.Linear(3, 3, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.table = jnp.ones(3)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.relu])

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = layer(x)
        return self.second(self.first(x * self.table))


@pytest.mark.slow
def test_nnx_variables_of_all_kinds_are_found_and_written_back():
    module = NNXOddities(nnx.Rngs(0))
    functional = as_functional(module)
    params, model_state, _ = functional.init(jax.random.key(0), X)
    assert {"/".join(str(part.key) for part in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)} == {
        "first/bias", "first/kernel", "second/bias", "layers/0/bias", "layers/0/kernel"}
    assert set(model_state) == {"table", "calls"}
    outputs, new_state = functional.apply(params, model_state, X, training=True, make_key=no_keys)
    assert new_state["calls"] == 1
    functional.absorb(jax.tree.map(lambda leaf: leaf * 2, params), {**new_state, "table": 2 * new_state["table"]})
    assert module.second.kernel is module.first.kernel
    assert module.calls[...] == 1
    np.testing.assert_array_equal(module.table, 2)
    assert not np.allclose(module(X), outputs)


class Sowing(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return x


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_nnx_sows_is_no_state():
    module = Sowing()
    module(X)
    functional = as_functional(module)
    params, model_state, _ = functional.init(jax.random.key(0), X)
    assert (params, model_state) == ({}, {})
    returned = functional.apply(params, model_state, X, training=True, make_key=no_keys)[1]
    assert set(returned) == {"intermediates"} and len(returned["intermediates"]["seen"]) == 1


class ManyStreams(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)
        self.stacked = rngs.split(3)

    def __call__(self, x):
        drawn = jax.vmap(jax.random.normal)(self.stacked.default.key[...])
        return self.first(x), self.second(x), drawn


def test_arrays_in_a_dict_of_an_nnx_module_are_state():
    class Tables(nnx.Module):
        def __init__(self):
            self.tables = nnx.data({"a": jnp.arange(3.0), "b": jnp.ones((3,), jnp.bfloat16)})
            self.scale = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            return x * self.scale * self.tables["a"].reshape(-1) + self.tables["b"]

    functional = as_functional(Tables())
    params, model_state, outputs = functional.init(jax.random.key(0), X)
    assert list(params) == ["scale"] and len(jax.tree.leaves(model_state)) == 2
    close(outputs, Tables()(X))


@pytest.mark.slow
def test_nnx_streams_are_named_by_their_path_and_stacked_keys_are_split():
    functional = as_functional(ManyStreams(nnx.Rngs(0)))
    params, model_state, _ = functional.init(jax.random.key(0), X)
    assert (params, model_state) == ({}, {})
    seen = []
    ones = jnp.ones((20, 3))
    first, second, drawn = functional.apply(params, model_state, ones, training=True, make_key=key_maker(seen=seen))[0]
    assert sorted(seen) == ["first/rngs", "second/rngs", "stacked/default"]
    assert not np.array_equal(first, second)
    assert len(set(map(float, drawn))) == 3
    again, _, _ = functional.apply(params, model_state, ones, training=True, make_key=key_maker())[0]
    np.testing.assert_array_equal(first, again)


# Stacks.

def test_a_linen_stack_names_parameters_as_flax_does_or_by_the_layers_own_name():
    stack = [nn.Dense(4), nn.relu, lambda x: x * 2, nn.Dense(2, name="head")]
    params, model_state, outputs = as_functional(stack).init(jax.random.key(0), X)
    assert set(params) == {"layers_0", "head"}
    assert model_state == {}
    assert outputs.shape == (8, 2)


@pytest.mark.parametrize("layer", [nn.Dense(3), nnx.Linear(3, 3, rngs=nnx.Rngs(0))])
def test_the_same_layer_twice_shares_its_parameters(layer):
    params, _, _ = as_functional([layer, nn.relu, layer]).init(jax.random.key(0), X)
    assert len(jax.tree.leaves(params)) == 2


def test_an_nnx_stack_trains_and_writes_back_into_the_users_layers():
    rngs = nnx.Rngs(0)
    dense, dropout = nnx.Linear(3, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    functional = as_functional([dense, nn.relu, dropout])
    params, model_state, evaluated = functional.init(jax.random.key(0), X)
    trained, _ = functional.apply(params, model_state, X, training=True, make_key=key_maker())
    assert not np.allclose(trained, evaluated)
    functional.absorb(jax.tree.map(jnp.zeros_like, params), model_state)
    np.testing.assert_array_equal(dense.kernel[...], 0)


def test_a_plain_function_is_a_module_without_parameters():
    params, model_state, outputs = as_functional(jnp.tanh).init(jax.random.key(0), X)
    assert (params, model_state) == ({}, {})
    close(outputs, np.tanh(X))


# Dicts.

def make_gan():
    return as_functional({"generator": LinenNet(), "discriminator": NNXNet(nnx.Rngs(0))})


@pytest.mark.slow
def test_named_modules_keep_parameters_and_state_by_name():
    gan = make_gan()
    inputs = {"generator": X, "discriminator": X}
    params, model_state, outputs = gan.init(jax.random.key(0), inputs)
    assert gan.names == ("generator", "discriminator")
    assert set(params) == set(model_state) == set(outputs) == set(gan.names)
    close(jax.jit(gan.init)(jax.random.key(0), inputs, gan.initial_values), (params, model_state, outputs))
    seen = []
    _, new_state = gan.apply(params["generator"], model_state, X, module="generator", training=True,
                             make_key=key_maker(seen=seen))
    assert set(seen) == {"generator/dropout"}
    assert new_state["discriminator"] is model_state["discriminator"]
    assert not np.allclose(*(state["generator"]["batch_stats"]["BatchNorm_0"]["mean"]
                             for state in (new_state, model_state)))
    _, unchanged = gan.apply(params["discriminator"], new_state, X, module="discriminator", training=False,
                             make_key=key_maker())
    assert unchanged is new_state


def test_named_modules_start_from_keys_that_do_not_depend_on_the_other_names():
    alone = as_functional({"b": nn.Dense(2)}).init(jax.random.key(0), {"b": X})[0]
    together = as_functional({"a": nn.Dense(2), "b": nn.Dense(2)}).init(jax.random.key(0), {"a": X, "b": X})[0]
    close(alone["b"], together["b"])
    assert not np.allclose(together["a"]["kernel"], together["b"]["kernel"])


def test_named_modules_absorb_each_their_own():
    net = NNXNet(nnx.Rngs(0))
    functional = as_functional({"linen": nn.Dense(2), "nnx": net})
    params, model_state, _ = functional.init(jax.random.key(0), {"linen": X, "nnx": X})
    functional.absorb(jax.tree.map(jnp.zeros_like, params), model_state)
    np.testing.assert_array_equal(net.head.kernel[...], 0)


# Several replicas.

@pytest.mark.slow
def test_replicas_drop_other_units():
    functional = as_functional(nn.Dropout(0.5))
    ones = np.ones((8, 16), np.float32)

    def step(_, batch):
        make_key = key_maker(replica=get_replica_context().replica_id_in_sync_group)
        return functional.apply({}, {}, batch, training=True, make_key=make_key)[0], ()

    rows, _ = run_replicas(step, 4, (), ones)
    assert len({row.tobytes() for row in np.asarray(rows)}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: nn.RNN(nn.LSTMCell(4)),
                                  lambda: nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))], ids=["linen", "nnx"])
def test_recurrent_layers_train_on_several_replicas(make):
    functional = as_functional(make())
    sequences = np.linspace(-1, 1, 8 * 5 * 3, dtype=np.float32).reshape(8, 5, 3)
    params, model_state, _ = functional.init(jax.random.key(0), sequences)

    def step(params, batch):
        def loss(params):
            outputs, _ = functional.apply(params, model_state, batch, training=True, make_key=key_maker())
            return jnp.square(outputs).mean()
        context = get_replica_context()
        return jnp.zeros(len(batch)), context.all_reduce("mean", jax.grad(loss)(params))

    close(run_replicas(step, 4, params, sequences)[1], run_replicas(step, 1, params, sequences)[1])


# Errors.

@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: as_functional(3), TypeError, "Flax module.*type int"),
    (lambda: as_functional(nn.Dense), TypeError, "an instance of a Flax module"),
    (lambda: as_functional({"a": 3}), TypeError, "Flax module.*type int"),
    (lambda: as_functional({1: nn.Dense(2)}), TypeError, "keys are strings.*type int"),
    (lambda: as_functional({}), ValueError, "at least one"),
    (lambda: as_functional([]), ValueError, "at least one layer"),
    (lambda: as_functional([nn.Dense(2), 3]), TypeError, "Layer 1 .*type int"),
    (lambda: as_functional([nn.Dense]), TypeError, r"Layer 0 .*class Dense.*Dense\(\.\.\.\)"),
    (lambda: as_functional([nn.Dense(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0))]), TypeError, "Linen or NNX.*both"),
    (lambda: make_gan().init(jax.random.key(0), {"generator": X, "discriminater": X}), ValueError,
     "'discriminater'.*Did you mean 'discriminator'"),
    (lambda: make_gan().init(jax.random.key(0), {"generator": X}), ValueError, "Missing: discriminator"),
    (lambda: make_gan().init(jax.random.key(0), X), TypeError, r"discriminator, generator.*array of shape \(8, 3\)"),
    (lambda: make_gan().apply({}, {}, X, training=True, make_key=no_keys), ValueError,
     "which module.*discriminator, generator"),
    (lambda: make_gan().apply({}, {}, X, module="generater", training=True, make_key=no_keys), ValueError,
     "Did you mean 'generator'"),
])
def test_errors_say_what_was_received_and_what_was_expected(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_named_nnx_modules_must_not_share_variables():
    shared = NNXNet(nnx.Rngs(0))
    with pytest.raises(ValueError, match="'a' and 'b' share a variable"):
        as_functional({"a": shared, "b": shared})
    with pytest.raises(ValueError, match="'a' and 'b' share a variable"):
        as_functional({"a": {"inner": shared}, "b": shared})
