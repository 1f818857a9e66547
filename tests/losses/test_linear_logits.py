"""Logits of a last layer that the loss computes in chunks of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, losses, models
from trainer.core.compile.cost_analysis import cost_of
from trainer.engine.model.core.model_core import core_of
from trainer.losses.linear_logits import linear_logits

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 50, (2, 20, 13)).astype(np.int32)
FEATURES, KERNEL = RNG.normal(size=(4, 13, 8)).astype(np.float32), RNG.normal(size=(8, 50)).astype(np.float32)


def loss_of(logits, labels=Y[:4], **options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)(labels, logits)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100])
@pytest.mark.parametrize("options", [{}, {"ignore_class": 3}, {"reduction": "sum"}])
def test_loss_and_gradients_are_those_of_all_logits(chunk_size, options):
    def in_chunks(features, kernel):
        return loss_of(losses.LinearLogits(features, kernel, chunk_size), **options)

    def at_once(features, kernel):
        return loss_of(features @ kernel, **options)

    for found, expected in zip(*(jax.tree.leaves(jax.value_and_grad(each, (0, 1))(FEATURES, KERNEL))
                                 for each in (in_chunks, at_once)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("use", [
    lambda logits: losses.SparseCategoricalCrossentropy(from_logits=True, axis=2)(Y[:4], logits),
    lambda logits: losses.CategoricalCrossentropy(from_logits=True)(jax.nn.one_hot(Y[:4], 50), logits),
    lambda logits: losses.as_loss(lambda labels, logits: -jnp.take_along_axis(
        jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0])(Y[:4], logits)])
def test_other_losses_receive_all_logits(use):
    np.testing.assert_allclose(use(losses.LinearLogits(FEATURES, KERNEL, 4)), loss_of(FEATURES @ KERNEL), rtol=1e-5)


def test_no_array_has_the_size_of_all_logits():
    def loss(features, kernel):
        return loss_of(losses.LinearLogits(features, kernel, 4))

    text = str(jax.jit(jax.grad(loss, (0, 1))).trace(FEATURES, KERNEL).jaxpr)
    assert "f32[4,4,50]" in text and "[4,13,50]" not in text and "[4,16,50]" not in text


class LanguageModel(nn.Module):
    chunk_size: int | None = None

    @nn.compact
    def __call__(self, tokens, training=False):
        embed = nn.Embed(50, 8)
        x = nn.relu(nn.Dense(8)(embed(tokens)))
        if not training or self.chunk_size is None:
            return x @ embed.embedding.T
        return losses.LinearLogits(x, embed.embedding.T, self.chunk_size)


@pytest.mark.slow
def test_the_language_model_returns_them_in_training_alone():
    model = models.TransformerLM(50, num_layers=0, d_model=8, num_heads=2, max_len=16, logits_chunk_size=4)
    variables = model.init(jax.random.key(0), X)
    logits = model.apply(variables, X, training=True)
    assert isinstance(logits, losses.LinearLogits) and logits.chunk_size == 4
    np.testing.assert_allclose(logits.array(), model.apply(variables, X), rtol=1e-6)


def trained(chunk_size, strategy=None, **options):
    trainer.utils.set_random_seed(1)
    with (strategy or distribute.OneDeviceStrategy()).scope():
        model = trainer.Model(LanguageModel(chunk_size))
        model.compile("adam", losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **options)
    history = model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y)).history
    return [*(np.array(values) for values in history.values()), *model.get_weights()]


@pytest.fixture(scope="module")
def at_once():
    return trained(None)


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.usefixtures("seeds_stay")
@pytest.mark.parametrize(("make", "options"), [
    (distribute.OneDeviceStrategy, {}), (distribute.OneDeviceStrategy, {"microbatches": 2, "remat": True}),
    (lambda: distribute.MirroredStrategy(jax.devices()[:2]), {}),
    (lambda: distribute.FullyShardedStrategy(jax.devices()[:4]), {})])
def test_training_is_that_of_all_logits(at_once, make, options):
    for found, expected in zip(trained(5, make(), **options), at_once, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-6)


@pytest.mark.slow
def test_products_of_gradients_have_the_dtype_of_the_features():
    features, kernel = FEATURES.astype(jnp.bfloat16), KERNEL
    gradient = jax.jit(jax.grad(lambda *args: loss_of(linear_logits(*args)), (0, 1)))
    assert set(cost_of(gradient.trace(features, kernel).jaxpr).products) == {"bfloat16"}
    found = gradient(features, kernel)
    expected = jax.grad(lambda *args: loss_of(jnp.dot(*args)), (0, 1))(features.astype(np.float32), kernel)
    for each, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(each.astype(np.float32), exact, rtol=0.03, atol=3e-4)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains(precision):
    model = trainer.Model(LanguageModel(4))
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True), precision=precision)
    first, last = (model.fit(X, Y, batch_size=8, verbose=0).history["loss"][0] for _ in range(2))
    assert last < first


@pytest.mark.parametrize(("features", "kernel", "error"), [
    ((4, 8), (8, 50), "features of shape"), ((4, 13, 8), (50, 8), "kernel of"), ((4, 13, 8), (8,), "kernel of")])
def test_shapes_that_do_not_match_are_refused(features, kernel, error):
    with pytest.raises(ValueError, match=error):
        losses.LinearLogits(np.zeros(features, np.float32), np.zeros(kernel, np.float32), 4)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_steps_on_several_devices_are_replicated(chunk_size):
    with distribute.MirroredStrategy(jax.devices()[:2]).scope():
        model = trainer.Model(models.TransformerLM(
            50, num_layers=0, d_model=8, num_heads=2, max_len=16, logits_chunk_size=chunk_size))
        model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    assert core_of(model).prepared_phase("train", (X, Y)).partitioned_because is None


@pytest.mark.slow
def test_a_module_that_always_returns_them_predicts_all_logits():
    class Always(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(50, 8)
            return {"logits": losses.LinearLogits(embed(tokens), embed.embedding.T, 4)}

    model = trainer.Model(Always())
    model.build(X[:1])
    table = np.asarray(model.get_weights()[0])
    np.testing.assert_allclose(model.predict(X, verbose=0)["logits"], table[X] @ table.T, rtol=1e-5, atol=1e-5)
