"""Linen and NNX modules, stacks and dicts behave alike behind the functional interface."""

import collections

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.module_cases import NETS, X, close, key_maker, no_keys, plain_dicts_of_arrays
from tests.support.networks import LinenMLP, logits_loss
from trainer.core.modules import as_functional
from trainer.core.modules.calling.call_arguments import CallKwargs, call_arguments


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


@pytest.mark.slow
@NETS
def test_init_can_be_compiled_and_only_evaluated_for_shapes(make):
    functional = as_functional(make())
    values = functional.initial_values
    expected = functional.init(jax.random.key(0), X)
    compiled = jax.jit(functional.init)(jax.random.key(0), X, values)
    close(compiled, expected)
    shapes = jax.eval_shape(functional.init, jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, expected) == jax.tree.map(lambda leaf: leaf.shape, shapes)


@pytest.mark.slow
@pytest.mark.every_case
@NETS
def test_training_drops_normalizes_and_records(make):
    functional = as_functional(make())
    params, model_state, evaluated = functional.init(jax.random.key(0), X)
    trained, new_state = functional.apply(params, model_state, X, training=True, make_key=key_maker())
    assert not np.allclose(trained, evaluated)
    assert jax.tree.structure(new_state) == jax.tree.structure(model_state)
    assert not any(np.allclose(old, new) for old, new in zip(jax.tree.leaves(model_state), jax.tree.leaves(new_state),
                                                             strict=True))


@pytest.mark.slow
@NETS
@pytest.mark.parametrize(("other", "same"), [({}, True), ({"seed": 1}, False), ({"step": 1}, False),
                                             ({"replica": 1}, False)])
def test_a_mask_is_a_function_of_seed_step_and_replica(make, other, same):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), X)
    first, second = (functional.apply(params, model_state, X, training=True, make_key=make_key)[0]
                     for make_key in (key_maker(), key_maker(**other)))
    assert np.array_equal(first, second) == same


@pytest.mark.slow
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
    (lambda x, y: x, ((1, 2),), ((1, 2), {})),
    (lambda x: x, ((1, 2),), (((1, 2),), {})),
    (lambda *, inputs, train: inputs, 1, ((), {"inputs": 1, "train": True})),
    (lambda *, inputs, train: inputs, (1,), ((), {"inputs": 1, "train": True})),
    (lambda *, inputs, mask=None: inputs, 1, ((), {"inputs": 1})),
    (lambda *, a, b: a, {"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
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


@pytest.mark.parametrize(("target", "inputs", "message"), [
    (lambda a, p, n: a, 1, r"needs 3 inputs, and `x` has none for p, n\. Pass `x` as \(a, p, n\).*`\(\(a, p, n\),\)`"),
    (lambda *, a, b: a, (1, 2), r"none for a, b\. Pass `x` as \{'a': \.\.\., 'b': \.\.\.\}"),
    (lambda a, b: a, (1, 2, 3), r"needs 2 inputs, and `x` has 3\. Pass `x` as \(a, b\)"),
    (lambda a, b: a, {"a": 1, "c": 2}, r"has the keys 'a', 'c'\. Pass `x` as \{'a': \.\.\., 'b': \.\.\.\}"),
])
def test_inputs_that_are_missing_are_named_with_the_form_of_all(target, inputs, message):
    with pytest.raises(TypeError, match=message):
        call_arguments(target, inputs, training=True)


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stream", ["noise", "dropout", "params"])
def test_each_stream_that_a_module_asks_for_gets_its_own_key(training, stream):
    functional = as_functional(Noisy(stream), CallKwargs(eval={}))  # "dropout" is meant outside of training too
    params, model_state, _ = functional.init(jax.random.key(0), X)
    seen = []
    first, _ = functional.apply(params, model_state, X, training=training, make_key=key_maker(seen=seen))
    second, _ = functional.apply(params, model_state, X, training=training, make_key=key_maker(step=1))
    assert set(seen) == {stream}
    assert not np.allclose(first, second)


@pytest.mark.slow
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


class Promoting(nn.Module):
    step: float = 1

    @nn.compact
    def __call__(self, x):
        key = self.variable("keys", "key", lambda: jax.random.key(0))
        count = self.variable("counters", "count", lambda: jnp.zeros((), jnp.int32))
        total = self.variable("stats", "total", lambda: jnp.zeros((), jnp.float16))
        if not self.is_initializing():
            key.value, count.value, total.value = jax.random.key(1), count.value + self.step, total.value + x.sum()
        return x


def test_linen_state_keeps_the_dtypes_that_it_is_created_in():
    functional = as_functional(Promoting())
    params, model_state, _ = functional.init(jax.random.key(0), X)
    _, new_state = functional.apply(params, model_state, X, training=True, make_key=no_keys)
    dtypes = [jax.tree.map(lambda leaf: leaf.dtype, state) for state in (model_state, new_state)]
    assert dtypes[0] == dtypes[1] and dtypes[0]["stats"] == {"total": jnp.float16}
    close(new_state["stats"]["total"], X.sum().astype(np.float16))
    assert jax.random.key_data(new_state["keys"]["key"])[-1] == new_state["counters"]["count"] == 1


def test_a_count_that_becomes_a_fraction_is_no_state_that_could_be_kept():
    assert set(as_functional(Promoting(0.5)).init(jax.random.key(0), X)[1]) == {"keys", "stats"}


@pytest.mark.slow
def test_running_averages_of_float64_data_stay_as_they_are_created():
    x = np.random.default_rng(0).normal(3.0, size=(16, 6))
    with jax.enable_x64(True):
        model = trainer.Model(LinenMLP(batch_norm=True))
        model.compile("sgd", logits_loss())
        model.fit(x, np.zeros(16, np.int64), batch_size=8, verbose=0)
        assert np.isfinite(model.evaluate(x, np.zeros(16, np.int64), verbose=0)["loss"])
        assert model.predict(x, verbose=0).dtype == np.float64
        averages = model.state.model_state["batch_stats"]["BatchNorm_0"]
        assert averages["mean"].dtype == jnp.float32 and np.abs(averages["mean"]).max() > 0


def test_metadata_boxes_of_linen_are_removed():
    boxed = nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))
    functional = as_functional(boxed)
    params, model_state, outputs = functional.init(jax.random.key(0), X)
    assert plain_dicts_of_arrays(params)
    close(functional.apply(params, model_state, X, training=True, make_key=no_keys)[0], outputs)


def test_a_module_that_flattens_its_rows_is_told_how_to_keep_them():
    class Flattening(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x.flatten())

    made = trainer.Model(Flattening())
    made.build(X[:4])
    with pytest.raises(flax.errors.ScopeParamShapeError) as raised:
        made.predict(X[:8], verbose=0)
    assert "`x.reshape(x.shape[0], -1)`" in raised.value.__notes__[-1]


@pytest.mark.slow
def test_steps_of_named_modules_that_are_not_overridden_are_named():
    made = trainer.Model({"first": nn.Dense(2), "last": nn.Dense(2)})
    made.build({"first": X, "last": X})
    message = r'`self.apply\(params\["first"\], .*module="first"\)`.*`predict_step`'
    with pytest.raises(ValueError, match=message) as raised:
        made.predict(X, verbose=0)
    assert "rows of shape" not in str(raised.value)


def test_a_class_or_a_name_in_the_place_of_a_layer_is_told_what_to_write():
    with pytest.raises(TypeError, match=r"an instance of a Flax module, not a class.*Dense\(...\)"):
        trainer.Model(nn.Dense)
    with pytest.raises(TypeError, match=r"Layer 1 .*Received: 'relu'. Use the function: `nn.relu`"):
        trainer.Sequential([nn.Dense(1), "relu"])
    with pytest.raises(TypeError, match=r"Received: 'reluu'. Names do not stand for layers"):
        trainer.Sequential(["reluu"])
