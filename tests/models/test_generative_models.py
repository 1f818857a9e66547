"""VAE and DCGAN: sizes, the divergence, what they refuse, and training under strategies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer
from trainer import models

rng = np.random.default_rng(0)
IMAGES = rng.uniform(size=(24, 8, 8, 1)).astype(np.float32)
SMALL = models.VAE(image_shape=(8, 8, 1), latent_dim=3, features=(4, 8), hidden=8)


def count(module, *shape):
    params = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def mirrored(replicas):
    return trainer.distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("module", "shape", "expected"), [
    (models.VAE(), (1, 28, 28, 1), 134_165),
    (models.DCGANGenerator(), (1, 100), 3_576_704),
    (models.DCGANDiscriminator(), (1, 64, 64, 3), 2_765_568),
])
def test_published_sizes_have_the_published_numbers_of_parameters(module, shape, expected):
    assert count(module, *shape) == expected


# --- VAE --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variables():
    return SMALL.init(jax.random.key(0), IMAGES)


@pytest.mark.slow
def test_initial_variables_are_parameters_alone(variables):
    assert list(variables) == ["params"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_reconstructions_are_float32_from_0_to_1(variables, dtype):
    module = SMALL.clone(dtype=dtype)
    for images in (module.apply(variables, IMAGES), module.apply(variables, np.zeros((5, 3)), method="decode")):
        assert images.dtype == jnp.float32 and images.shape[1:] == (8, 8, 1)
        assert images.min() > 0 and images.max() < 1


@pytest.mark.slow
def test_without_an_activation_the_logits_come_out(variables):
    logits = SMALL.clone(output_activation=None).apply(variables, IMAGES)
    np.testing.assert_allclose(jax.nn.sigmoid(logits), SMALL.apply(variables, IMAGES), rtol=1e-5)


@pytest.mark.slow
def test_the_divergence_is_that_of_normal_distributions(variables):
    variables = jax.tree.map(lambda leaf: 3 * leaf, variables)  # far from the standard normal distribution
    mean, log_variance = (np.asarray(value, np.float64) for value in SMALL.apply(variables, IMAGES, method="encode"))
    draws = mean + np.exp(log_variance / 2) * np.random.default_rng(1).normal(size=(20_000, *mean.shape))
    # The mean of log q(z) - log p(z) over what q draws.
    ratio = 0.5 * (np.square(draws) - np.square(draws - mean) / np.exp(log_variance) - log_variance).sum(-1)
    _, sown = SMALL.clone(beta=2.0).apply(variables, IMAGES, mutable=["losses"])
    np.testing.assert_allclose(sown["losses"]["divergence"][0], 2 * ratio.mean() / 64, rtol=0.01)


@pytest.mark.slow
def test_latent_values_are_drawn_in_training_only(variables):
    def reconstructions(training, seed):
        return SMALL.apply(variables, IMAGES, training=training, rngs={"latent": jax.random.key(seed)})

    np.testing.assert_array_equal(reconstructions(False, 1), reconstructions(False, 2))
    assert np.abs(reconstructions(True, 1) - reconstructions(True, 2)).max() > 1e-3
    mean, _ = SMALL.apply(variables, IMAGES, method="encode")
    np.testing.assert_allclose(SMALL.apply(variables, mean, method="decode"), reconstructions(False, 1), rtol=1e-6)


def fit(strategy, rows=24, epochs=2, optimizer=None, options=None):
    with strategy.scope():
        model = trainer.Model(SMALL)
        model.compile(optimizer or optax.sgd(0.5), "binary_crossentropy", **(options or {}))
    losses = model.fit(IMAGES[:rows], IMAGES[:rows], batch_size=8, epochs=epochs, verbose=0).history["loss"]
    return model, losses


@pytest.mark.slow
def test_training_lowers_the_loss_which_holds_the_divergence():
    model, losses = fit(mirrored(2), epochs=10, optimizer=optax.adam(0.01))
    assert losses[-1] < losses[0]
    images = model.predict(IMAGES, verbose=0)
    entropy = -(IMAGES * np.log(images) + (1 - IMAGES) * np.log(1 - images)).mean()
    _, sown = SMALL.apply({"params": model.state.params}, IMAGES, mutable=["losses"])
    divergence = float(sown["losses"]["divergence"][0])
    assert divergence > 0
    np.testing.assert_allclose(model.evaluate(IMAGES, IMAGES, verbose=0)["loss"], entropy + divergence, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "options"), [(24, {}), (21, {}), (24, {"remat": True})])
def test_two_devices_have_the_numbers_of_one(rows, options):
    (one, first), (two, second) = (fit(mirrored(replicas), rows=rows, options=options) for replicas in (1, 2))
    np.testing.assert_allclose(second, first, rtol=1e-5)
    for expected, found in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# --- DCGAN ------------------------------------------------------------------------------------------------------------


GENERATOR = models.DCGANGenerator(image_shape=(8, 8, 1), features=(8, 4))
DISCRIMINATOR = models.DCGANDiscriminator(features=(4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize(("shape", "features"), [((28, 28, 1), (8, 4)), ((32, 32, 3), (8, 8, 4)),
                                                 ((64, 64, 3), (8, 8, 4, 4))])
def test_images_and_logits_are_float32_of_the_expected_shapes(shape, features, dtype):
    generator = models.DCGANGenerator(image_shape=shape, features=features, dtype=dtype)
    noise = rng.normal(size=(3, 5)).astype(np.float32)
    images, _ = generator.init_with_output(jax.random.key(0), noise)
    assert images.shape == (3, *shape) and images.dtype == jnp.float32 and jnp.abs(images).max() <= 1
    logits, _ = models.DCGANDiscriminator(features=features[::-1], dtype=dtype).init_with_output(
        jax.random.key(0), images)
    assert logits.shape == (3, 1) and logits.dtype == jnp.float32


class GAN(trainer.Model):
    def __init__(self):
        super().__init__({"generator": GENERATOR, "discriminator": DISCRIMINATOR})
        self.logistic = trainer.losses.BinaryCrossentropy(from_logits=True)

    def sample_inputs(self, batch):
        return {"generator": np.zeros((1, 5), np.float32), "discriminator": batch[:1]}

    def train_step(self, state, real):
        noise = jax.random.normal(self.make_rng(state, "noise"), (real.shape[0], 5))
        ones, zeros = jnp.ones((real.shape[0], 1)), jnp.zeros((real.shape[0], 1))

        def run(name, params, state, x):
            outputs, model_state = self.apply(params, state, x, module=name, training=True)
            return outputs, state.replace(model_state=model_state)

        fake, state = run("generator", state.params["generator"], state, noise)

        def discriminator_loss(params):
            of_real, after = run("discriminator", params, state, real)
            of_fake, after = run("discriminator", params, after, fake)
            return self.logistic(ones, of_real) + self.logistic(zeros, of_fake), after.model_state

        (first, moved), grads = jax.value_and_grad(discriminator_loss, has_aux=True)(state.params["discriminator"])
        state = state.apply_gradients(discriminator=grads, model_state=moved)

        def generator_loss(params):
            made, _ = run("generator", params, state, noise)
            return self.logistic(ones, run("discriminator", state.params["discriminator"], state, made)[0])

        second, grads = jax.value_and_grad(generator_loss)(state.params["generator"])
        return {"d_loss": first, "g_loss": second}, state.apply_gradients(generator=grads)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_networks_train_with_two_optimizers(replicas):
    with mirrored(replicas).scope():
        gan = GAN()
        gan.compile({"generator": optax.adam(1e-3), "discriminator": optax.adam(1e-3)})
    gan.build(IMAGES)
    before = {name: jax.tree.map(np.asarray, tree) for name, tree in gan.state.params.items()}
    stats = jax.tree.map(np.asarray, gan.state.model_state)
    history = gan.fit(2 * IMAGES - 1, batch_size=8, epochs=2, verbose=0).history
    assert set(history) == {"d_loss", "g_loss"} and np.isfinite(history["d_loss"] + history["g_loss"]).all()
    for old, new in ((before, gan.state.params), (stats, gan.state.model_state)):
        moved = jax.tree.map(lambda one, two: bool((one != np.asarray(two)).any()), old, dict(new))
        assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(("module", "shape", "message"), [
    (SMALL, (2, 28, 28, 1), r"shape \(rows, 8, 8, 1\). Received: shape \(2, 28, 28, 1\).*`image_shape`"),
    (SMALL.clone(image_shape=(10, 8, 1)), (2, 10, 8, 1), r"multiples of 4.*Received: \(10, 8, 1\). Pad"),
    (GENERATOR, (2, 5, 1), r"noise of shape \(rows, values\). Received: shape \(2, 5, 1\)"),
    (GENERATOR.clone(image_shape=(10, 8, 1)), (2, 5), r"multiples of 4.*Received: \(10, 8, 1\)"),
    (DISCRIMINATOR, (2, 8, 8), r"images of shape.*channel axis"),
    (DISCRIMINATOR, (2, 2, 8, 1), r"multiples of 4.*Received: \(2, 8, 1\)"),
])
def test_what_cannot_be_convolved_is_refused(module, shape, message):
    with pytest.raises(ValueError, match=message):
        module.init(jax.random.key(0), np.zeros(shape, np.float32))
