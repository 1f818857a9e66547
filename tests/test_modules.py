"""Linen and NNX modules, stacks and dicts behave alike behind the functional interface."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tests.simulated_replicas import run_replicas
from trainer.modules import as_functional
from trainer.modules.base import call_arguments
from trainer.replica import get_replica_context
from trainer.rng import stream_key

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def key_maker(seed=0, step=0, replica=0, seen=None):
    def make_key(stream):
        if seen is not None:
            seen.append(stream)
        return stream_key(seed, stream, step, replica)
    return make_key


def no_keys(stream):
    raise AssertionError(f"no key of {stream!r} is needed")


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm()(nn.Dense(4)(x))
        return nn.Dense(2)(nn.Dropout(0.5)(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.dense(x))))


NETS = pytest.mark.parametrize("make", [LinenNet, lambda: NNXNet(nnx.Rngs(0)),
                                        lambda: [nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5), nn.relu, nn.Dense(2)]],
                               ids=["linen", "nnx", "stack"])


def plain_dicts_of_arrays(tree):
    if isinstance(tree, dict):
        return all(isinstance(key, str) and plain_dicts_of_arrays(value) for key, value in tree.items())
    return isinstance(tree, jax.Array)


def close(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first, second)


@NETS
def test_init_returns_plain_trees_and_the_outputs_of_the_sample(make):
    functional = as_functional(make())
    params, model_state, outputs = functional.init(jax.random.key(0), X)
    assert plain_dicts_of_arrays(params)
    assert plain_dicts_of_arrays(model_state)
    assert len(jax.tree.leaves(params)) == 6
    assert sorted(leaf.shape for leaf in jax.tree.leaves(model_state)) == [(4,), (4,)]
    same, unchanged = functional.apply(params, model_state, X, training=False, make_key=key_maker())
    assert unchanged is model_state
    close(same, outputs)


@NETS
def test_init_can_be_compiled_and_only_evaluated_for_shapes(make):
    functional = as_functional(make())
    values = functional.initial_values
    expected = functional.init(jax.random.key(0), X)
    compiled = jax.jit(functional.init)(jax.random.key(0), X, values)
    close(compiled, expected)
    shapes = jax.eval_shape(functional.init, jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, expected) == jax.tree.map(lambda leaf: leaf.shape, shapes)


@NETS
def test_training_drops_normalizes_and_records(make):
    functional = as_functional(make())
    params, model_state, evaluated = functional.init(jax.random.key(0), X)
    trained, new_state = functional.apply(params, model_state, X, training=True, make_key=key_maker())
    assert not np.allclose(trained, evaluated)
    assert jax.tree.structure(new_state) == jax.tree.structure(model_state)
    assert not any(np.allclose(old, new) for old, new in zip(jax.tree.leaves(model_state), jax.tree.leaves(new_state),
                                                             strict=True))


@NETS
@pytest.mark.parametrize(("other", "same"), [({}, True), ({"seed": 1}, False), ({"step": 1}, False),
                                             ({"replica": 1}, False)])
def test_a_mask_is_a_function_of_seed_step_and_replica(make, other, same):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), X)
    first, second = (functional.apply(params, model_state, X, training=True, make_key=make_key)[0]
                     for make_key in (key_maker(), key_maker(**other)))
    assert np.array_equal(first, second) == same


@NETS
def test_apply_can_be_compiled_and_differentiated(make):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), X)

    @jax.jit
    def step(params, model_state, number):
        def loss(params):
            outputs, new_state = functional.apply(params, model_state, X, training=True,
                                                  make_key=key_maker(step=number))
            return jnp.square(outputs).sum(), new_state
        return jax.grad(loss, has_aux=True)(params)

    gradients, new_state = step(params, model_state, 3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, new_state)))
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


# Calling convention.

@pytest.mark.parametrize(("target", "inputs", "expected"), [
    (lambda x: x, 1, ((1,), {})),
    (lambda x, training: x, 1, ((1,), {"training": True})),
    (lambda x, train=False: x, 1, ((1,), {"train": True})),
    (lambda x, *, is_training: x, 1, ((1,), {"is_training": True})),
    (lambda x, deterministic=True: x, 1, ((1,), {"deterministic": False})),
    (lambda x, **kwargs: x, 1, ((1,), {})),
    (lambda x, y: x, (1, 2), ((1, 2), {})),
    (lambda x, y, z=0: x, (1, 2), ((1, 2), {})),
    (lambda x, y: x, [1, 2], ((1, 2), {})),
    (lambda x: x, (1, 2), (((1, 2),), {})),
    (lambda x, train: x, (1, 2), (((1, 2),), {"train": True})),
    (lambda x, train, y: x, (1, 2), ((1,), {"y": 2, "train": True})),
    (lambda *args: args, (1, 2), ((1, 2), {})),
    (lambda a, b: a, {"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
    (lambda a, b, train: a, {"a": 1, "b": 2}, ((), {"a": 1, "b": 2, "train": True})),
    (lambda x: x, {"a": 1, "b": 2}, (({"a": 1, "b": 2},), {})),
    (nn.Dropout(0.5), 1, ((1,), {"deterministic": False})),
    (nn.Dropout(0.5, deterministic=True), 1, ((1,), {})),
    (nn.relu, 1, ((1,), {})),
    (max, 1, ((1,), {})),
])
def test_a_batch_becomes_the_arguments_that_the_signature_asks_for(target, inputs, expected):
    assert call_arguments(target, inputs, training=True) == expected


def test_a_named_tuple_is_one_input():
    pair = collections.namedtuple("Pair", "a b")(1, 2)
    assert call_arguments(lambda x, y=0: x, pair, training=False) == ((pair,), {})


class LinenFlag(nn.Module):
    @nn.compact
    def __call__(self, a, b, *, train):
        return a + b if train else a - b


class NNXFlag(nnx.Module):
    def __call__(self, a, b, *, train):
        return a + b if train else a - b


@pytest.mark.parametrize("module", [LinenFlag(), NNXFlag(), [LinenFlag()],
                                    lambda a, b, train: a + b if train else a - b])
@pytest.mark.parametrize("inputs", [(X, X), {"a": X, "b": X}])
def test_modules_are_told_whether_they_are_trained(module, inputs):
    functional = as_functional(module)
    params, model_state, outputs = functional.init(jax.random.key(0), inputs)
    close(outputs, 0 * X)
    close(functional.apply(params, model_state, inputs, training=True, make_key=no_keys)[0], 2 * X)


@pytest.mark.parametrize("module", [
    nn.Sequential([nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5)]),
    nn.Sequential([nn.MultiHeadDotProductAttention(num_heads=1, dropout_rate=0.5)]),
])
def test_nested_linen_layers_without_a_flag_get_their_default_from_the_phase(module):
    functional = as_functional(module)
    params, model_state, evaluated = functional.init(jax.random.key(0), X)
    trained, _ = functional.apply(params, model_state, X, training=True, make_key=key_maker())
    assert not np.allclose(trained, evaluated)


def test_a_flag_that_the_user_set_is_kept():
    frozen = nn.Sequential([nn.BatchNorm(use_running_average=True), nn.Dropout(0.5, deterministic=True)])
    functional = as_functional(frozen)
    params, model_state, evaluated = functional.init(jax.random.key(0), X)
    trained, new_state = functional.apply(params, model_state, X, training=True, make_key=no_keys)
    close(trained, evaluated)
    close(new_state, model_state)


# Linen: random streams and collections.

class Noisy(nn.Module):
    stream: str = "noise"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + jax.random.normal(self.make_rng(self.stream), x.shape)


class NoisyScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(module, carry, _):
            noise = jax.random.normal(module.make_rng("noise"), carry.shape)
            return carry, noise
        return nn.scan(body, variable_broadcast="params", split_rngs={"noise": True}, length=2)(self, x, None)[1]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stream", ["noise", "dropout", "params"])
def test_each_stream_that_a_module_asks_for_gets_its_own_key(training, stream):
    functional = as_functional(Noisy(stream))
    params, model_state, _ = functional.init(jax.random.key(0), X)
    seen = []
    first, _ = functional.apply(params, model_state, X, training=training, make_key=key_maker(seen=seen))
    second, _ = functional.apply(params, model_state, X, training=training, make_key=key_maker(step=1))
    assert set(seen) == {stream}
    assert not np.allclose(first, second)


def test_a_scan_that_splits_a_stream_draws_other_numbers_in_each_iteration():
    functional = as_functional(NoisyScan())
    params, model_state, _ = functional.init(jax.random.key(0), X)
    noise, _ = functional.apply(params, model_state, X, training=True, make_key=key_maker())
    assert not np.allclose(noise[0], noise[1])


class Collections(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        self.sow("intermediates", "x", x)
        self.sow("losses", "grows", x.sum())
        self.sow("sums", "total", x.sum(), reduce_fn=lambda a, b: a + b, init_fn=lambda: jnp.zeros(()))
        return nn.Dense(2)(x)


def test_linen_state_is_each_collection_that_keeps_its_structure():
    functional = as_functional(Collections())
    params, model_state, _ = functional.init(jax.random.key(0), X)
    assert set(model_state) == {"counters", "sums"}
    _, new_state = functional.apply(params, model_state, X, training=True, make_key=no_keys)
    assert new_state["counters"]["calls"] == 1
    _, unchanged = functional.apply(params, new_state, X, training=False, make_key=no_keys)
    assert unchanged["counters"]["calls"] == 1


def test_metadata_boxes_of_linen_are_removed():
    boxed = nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))
    functional = as_functional(boxed)
    params, model_state, outputs = functional.init(jax.random.key(0), X)
    assert plain_dicts_of_arrays(params)
    close(functional.apply(params, model_state, X, training=True, make_key=no_keys)[0], outputs)


# NNX: values, sharing and what becomes of the user's object.

def test_nnx_starts_from_the_users_values_and_never_aliases_them():
    module = NNXNet(nnx.Rngs(0))
    module.dense.kernel[...] = jnp.full((3, 4), 2.0)
    params, _, _ = as_functional(module).init(jax.random.key(1), X)
    np.testing.assert_array_equal(params["dense"]["kernel"], 2.0)
    params["dense"]["kernel"].delete()
    np.testing.assert_array_equal(module.dense.kernel[...], 2.0)


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
    assert functional.apply(params, model_state, X, training=True, make_key=no_keys)[1] == {}


class ManyStreams(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)
        self.stacked = rngs.split(3)

    def __call__(self, x):
        drawn = jax.vmap(jax.random.normal)(self.stacked.default.key[...])
        return self.first(x), self.second(x), drawn


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

def test_replicas_drop_other_units():
    functional = as_functional(nn.Dropout(0.5))
    ones = np.ones((8, 16), np.float32)

    def step(_, batch):
        make_key = key_maker(replica=get_replica_context().replica_id_in_sync_group)
        return functional.apply({}, {}, batch, training=True, make_key=make_key)[0], ()

    rows, _ = run_replicas(step, 4, (), ones)
    assert len({row.tobytes() for row in np.asarray(rows)}) == 8


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
    (lambda: make_gan().init(jax.random.key(0), X), TypeError, "discriminator, generator.*type ndarray"),
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
