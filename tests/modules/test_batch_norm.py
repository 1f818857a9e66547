"""Batch normalization computes the same on any number of replicas, with and without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import mirrored
from tests.support.simulated_replicas import run_replicas
from trainer.core import replica_context
from trainer.core.modules import as_functional
from trainer.core.replica_context import get_replica_context
from trainer.core.tree_paths import matches

TOLERANCE = 5e-7
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(1.0, 2.0, (8, 3, 2, 4)).astype(np.float32)
WEIGHTS = RANDOM.normal(size=IMAGES.shape[1:]).astype(np.float32)


def no_keys(stream):
    raise AssertionError(f"no key of {stream!r} is needed")


class LinenSubclass(nn.BatchNorm):
    def __call__(self, x, **kwargs):
        return super().__call__(x * 2, **kwargs)


class NNXSubclass(nnx.BatchNorm):
    def __call__(self, x, **kwargs):
        return super().__call__(x * 2, **kwargs)


class LinenMasked(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm()(x, mask=x < 2)


class NNXMasked(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(x, mask=x < 2)


class LinenPerItem(nn.Module):
    """Normalizes the items of each row as a batch of their own."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm()(x.reshape(-1, 4)).reshape(x.shape)


class LinenRemat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.BatchNorm)()(x)


def options(**kwargs):
    return [lambda: nn.BatchNorm(**kwargs), lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0), **kwargs)]


CASES = {
    "plain": options(),
    "centred": options(use_fast_variance=False),
    "no_scale": options(use_scale=False, momentum=0.5, epsilon=0.1),
    "no_bias": options(use_bias=False),
    "subclass": [LinenSubclass, lambda: NNXSubclass(4, rngs=nnx.Rngs(0))],
    "masked": [LinenMasked, lambda: NNXMasked(nnx.Rngs(0))],
    "named_axis": options(axis_name="ignored"),
    "flag_false": options(use_running_average=False),
    "per_item": [LinenPerItem],
    "remat": [LinenRemat],
    "listed": [lambda: [nn.BatchNorm()], lambda: [nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nn.relu]],
}
MODULES = [pytest.param(make, id=f"{name}-{kind}") for name, makes in CASES.items()
           for make, kind in zip(makes, ("linen", "nnx"), strict=False)]


def train(functional, batch, number, real_rows=None, policy="global", is_frozen=None):
    """Returns the outputs per row, and (gradients, state) of the mean over real rows, as a step computes them."""
    params, model_state, _ = functional.init(jax.random.key(0), batch)

    def step(replicated, batch):
        params, model_state = replicated
        context = get_replica_context()

        def loss(params):
            outputs, new_state = functional.apply(params, model_state, batch, training=True, make_key=no_keys,
                                                  batch_norm=policy, is_frozen=is_frozen)
            rows = jnp.sum(jnp.square(outputs) * WEIGHTS, axis=(1, 2, 3)) * context.row_mask
            return rows.sum() * context.num_replicas_in_sync / context.global_rows, (outputs, new_state)

        gradients, (outputs, new_state) = jax.grad(loss, has_aux=True)(params)
        return outputs, context.all_reduce("mean", (gradients, new_state))

    return run_replicas(step, number, (params, model_state), batch, real_rows)


def padded(rows, size=8):
    """`rows` real rows, filled up to `size` with repeats of the first."""
    return np.concatenate([IMAGES[:rows], np.repeat(IMAGES[:1], size - rows, axis=0)])


def assert_close(first, second, tolerance=TOLERANCE):
    def compare(a, b):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)
    jax.tree.map(compare, first, second)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize(("number", "rows"), [(4, 8), (4, 5), (2, 1)])
def test_replicas_give_one_devices_outputs_gradients_and_averages(make, number, rows):
    functional = as_functional(make())
    expected_outputs, expected = train(functional, IMAGES[:rows], 1)
    outputs, results = train(functional, padded(rows), number, rows)
    assert_close(outputs[:rows], expected_outputs)
    assert_close(results, expected)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", options(momentum=0.9) + options(use_fast_variance=False, epsilon=1e-3))
def test_one_device_computes_what_flax_computes(make):
    module = make()
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), IMAGES)
    outputs, new_state = functional.apply(params, model_state, IMAGES, training=True, make_key=no_keys)
    if isinstance(module, nn.BatchNorm):
        expected, updates = module.apply({"params": params, **model_state}, IMAGES, use_running_average=False,
                                         mutable=["batch_stats"])
    else:
        expected = module(IMAGES)
        updates = {"mean": module.mean[...], "var": module.var[...]}
    assert_close(outputs, expected)
    assert_close(new_state, dict(updates))


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    lambda: nn.BatchNorm(axis=1), lambda: nnx.BatchNorm(3, axis=1, rngs=nnx.Rngs(0)), lambda: nn.BatchNorm(axis=(1, 3)),
])
def test_the_feature_axis_is_honoured(make):
    functional = as_functional(make())
    expected_outputs, expected = train(functional, IMAGES[:5], 1)
    outputs, results = train(functional, padded(5), 4, 5)
    assert_close(outputs[:5], expected_outputs)
    assert_close(results, expected)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", options(dtype=jnp.bfloat16))
def test_half_precision_outputs_have_statistics_in_single_precision(make):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), IMAGES)
    outputs, new_state = functional.apply(params, model_state, IMAGES, training=True, make_key=no_keys)
    assert outputs.dtype == jnp.bfloat16
    mean = next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(new_state) if path[-1].key == "mean")
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, 0.01 * IMAGES.mean((0, 1, 2)), rtol=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.every_case
@pytest.mark.parametrize("make", options(momentum=0.0))
def test_per_replica_statistics_are_over_a_replicas_real_rows_or_its_padding(make):
    functional = as_functional(make())
    outputs, (_, new_state) = train(functional, padded(5), 4, 5, "per_replica")
    # Two rows each: two real, two real, one of two real, none real.
    groups = [IMAGES[0:2], IMAGES[2:4], IMAGES[4:5], IMAGES[:1]]
    for number, group in enumerate(groups[:3]):
        expected, _ = train(functional, group, 1)
        assert_close(outputs[2 * number:2 * number + len(group)], expected)
    means = np.mean([group.mean((0, 1, 2)) for group in groups], axis=0)
    assert_close(jax.tree.leaves(new_state)[0], means)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", options(momentum=0.9))
def test_a_layer_exchanges_one_array(make):
    class Counting(replica_context.ReplicaContext):
        num_replicas_in_sync = 2
        shapes = []

        def all_reduce(self, reduce_op, value):
            self.shapes.append(jax.tree.map(jnp.shape, value))
            return value

    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), IMAGES)
    for policy, expected in (("global", [(2, 4)]), ("per_replica", [])):
        Counting.shapes = []
        with replica_context.enter(Counting(rows=8)):
            functional.apply(params, model_state, IMAGES, training=True, make_key=no_keys, batch_norm=policy)
        assert Counting.shapes == expected


class OfBranches(nn.Module):
    """Normalizes two branches, which it maps over, together."""

    @nn.compact
    def __call__(self, x, training: bool = False):
        normalize = nn.vmap(nn.BatchNorm, in_axes=1, out_axes=1, axis_name="branch", axis_size=2,
                            variable_axes={"params": None, "batch_stats": None}, split_rngs={"params": False})
        layer = normalize(axis_name="branch", use_running_average=not training)
        return nn.Dense(1)(layer(x.reshape(len(x), 2, -1)).reshape(len(x), -1))


@pytest.mark.slow
def test_an_axis_that_the_module_maps_over_is_one_of_the_statistics():
    x = RANDOM.normal(size=(16, 6)).astype(np.float32)
    found = {}
    for count in (1, 4):
        with mirrored(count).scope():
            model = trainer.Model(OfBranches(), seed=0)
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        found[count] = model.get_weights()
    for one, four in zip(found[1], found[4], strict=True):
        np.testing.assert_allclose(one, four, atol=1e-6)
    batch, seen = x[:8].reshape(-1, 3), [weight.shape for weight in found[1]]
    assert (3,) in seen
    with mirrored(1).scope():
        model = trainer.Model(OfBranches(), seed=0)
        model.compile("sgd", "mse")
    model.fit(x[:8], x[:8, :1], batch_size=8, verbose=0)
    mean = model.state.model_state["batch_stats"]
    np.testing.assert_allclose(jax.tree.leaves(mean)[0], 0.01 * batch.mean(0), rtol=1e-5)


@pytest.mark.parametrize("make", options(use_running_average=True)[:1])
def test_a_frozen_layer_keeps_its_averages(make):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), IMAGES)
    assert_close(functional.apply(params, model_state, IMAGES, training=True, make_key=no_keys)[1], model_state)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["global", "per_replica"])
@pytest.mark.parametrize("make", MODULES)
def test_with_frozen_parameters_a_layer_normalizes_by_its_averages_and_keeps_them(make, policy):
    functional = as_functional(make())
    _, before, _ = functional.init(jax.random.key(0), IMAGES)
    outputs, (_, after) = train(functional, padded(5), 4, 5, policy, is_frozen=lambda path: True)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    doubled = train(functional, 2 * padded(5), 4, 5, policy, is_frozen=lambda path: True)[0]
    assert_close(doubled[:5], 2 * outputs[:5])  # of its averages, 0 and 1; of a batch's it would be the same as before


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("arguments", "pattern", "is_kept"), [
    ({}, "norm", True), ({}, "norm/scale", False), ({}, "norm/.*", True), ({}, "other", False),
    ({"use_bias": False}, "scale", True), ({"use_bias": False}, "bias", False),
    ({"use_bias": False, "use_scale": False}, "part", True), ({"use_bias": False, "use_scale": False}, "scale", False),
])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_layer_is_frozen_if_all_its_parameters_are_or_else_its_path(kind, arguments, pattern, is_kept):
    class NNXNormed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0), **arguments)

        def __call__(self, x):
            return self.norm(x)

    part = [nn.BatchNorm(name="norm", **arguments)] if kind == "linen" else NNXNormed()
    functional = as_functional({"part": part, "head": [nn.Dense(1)]})
    params, before, _ = functional.init(jax.random.key(0), {"part": IMAGES, "head": IMAGES})
    _, after = functional.apply(params["part"], before, IMAGES, module="part", training=True, make_key=no_keys,
                                is_frozen=lambda path: matches(pattern, path))
    kept = [np.array_equal(*leaves) for leaves in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
    assert kept == [is_kept] * 2


class LinenTransfer(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        x = nn.BatchNorm(use_running_average=not training, name="norm")(nn.Dense(4, name="encoder")(x))
        return nn.Dense(1, name="head")(x)


class NNXTransfer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder, self.head = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.encoder(x)))


STATISTICS = [np.array([1, 0, -1, 2], np.float32), np.array([4, 1, 0.25, 2], np.float32)]


def transfer_model(module, replicas=1):
    with mirrored(replicas).scope():
        model = trainer.Model(module())
    rows = np.random.default_rng(0).normal(1, 2, (16, 3)).astype(np.float32)
    model.build(rows)
    model.set_weights([np.zeros(4), np.linspace(-1, 1, 12).reshape(3, 4), np.zeros(1),
                       np.linspace(1, -1, 4).reshape(4, 1), np.zeros(4), np.ones(4), *STATISTICS])

    def fit(epochs=1):
        return model.fit(rows, rows.sum(1, keepdims=True), batch_size=8, epochs=epochs, shuffle=False, verbose=0)

    def evaluate():
        return model.evaluate(rows, rows.sum(1, keepdims=True), batch_size=8, verbose=0)

    return model, fit, evaluate


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "compile_options"), [
    (1, {}), (3, {"remat": True, "ema_decay": 0.9}), (2, {"batch_norm": "per_replica", "microbatches": 2}),
    (1, {"precision": "mixed_bfloat16"}), (1, {"run_eagerly": True}),
])
@pytest.mark.parametrize("module", [LinenTransfer, NNXTransfer])
def test_a_frozen_encoder_trains_as_in_keras(module, replicas, compile_options):
    model, fit, _ = transfer_model(module, replicas)
    model.compile(trainer.optimizers.SGD(0.01), "mse", freeze=["encoder", "norm"], **compile_options)
    rtol = 0.02 if "precision" in compile_options else 1e-5
    losses = fit(epochs=2).history["loss"]
    # Of Keras 3.15 on JAX, with `trainable = False` set on both layers and BatchNorm of Flax's momentum and epsilon.
    np.testing.assert_allclose(losses, [43.32493591308594, 28.944259643554688], rtol=rtol)
    for leaf, given in zip(model.get_weights()[-2:], STATISTICS, strict=True):
        np.testing.assert_array_equal(leaf, given)


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenTransfer, NNXTransfer])
def test_a_model_that_is_not_trainable_fits_what_it_evaluates_until_it_is_thawed(module):
    model, fit, evaluate = transfer_model(module)
    model.compile(trainer.optimizers.SGD(0.01), "mse")
    for _ in range(2):
        before = model.get_weights()
        model.trainable = False
        np.testing.assert_allclose(fit().history["loss"], evaluate()["loss"], rtol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, model.get_weights(), before)
        model.trainable = True
        assert fit().history["loss"][0] != pytest.approx(evaluate()["loss"], rel=1e-3)
        assert not any(np.array_equal(*leaves) for leaves in zip(model.get_weights()[-2:], before[-2:], strict=True))


def test_a_padded_batch_whose_rows_cannot_be_told_is_refused():
    functional = as_functional([lambda x: x.reshape(3, -1), nn.BatchNorm()])
    context = replica_context.ReplicaContext(rows=8, row_mask=jnp.ones(8))
    with replica_context.enter(context), pytest.raises(ValueError, match=r"8 rows of a padded batch.*shape \(3, 64\)"):
        functional.init(jax.random.key(0), IMAGES)
