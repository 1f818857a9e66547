"""Trains a DCGAN on scikit-learn's digits: two networks, two optimizers, one step that is written by hand.

`Model` takes both networks by name, and `compile` an optimizer for each. The step returns the gradients of both losses,
and `fit` does the rest: batches, metrics, history. `made.png` has ten of the digits that the generator makes. Radford
et al., "Unsupervised representation learning with deep convolutional generative adversarial networks",
https://arxiv.org/abs/1511.06434.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import trainer
from trainer import models

NOISE = 32


class DCGAN(trainer.Model):
    """A generator and a discriminator; batches are images with values from -1 to 1."""

    def __init__(self) -> None:
        super().__init__({"generator": models.DCGANGenerator(image_shape=(8, 8, 1), features=(64, 32)),
                          "discriminator": models.DCGANDiscriminator(features=(32, 64))})
        self.logistic = trainer.losses.BinaryCrossentropy(from_logits=True)

    def sample_inputs(self, batch: Any) -> dict[str, Any]:
        return {"generator": np.zeros((1, NOISE), np.float32), "discriminator": batch[:1]}

    def train_step(self, state: Any, batch: Any) -> tuple[dict[str, Any], Any]:
        noise = jax.random.normal(self.make_rng(state, "noise"), (batch.shape[0], NOISE))
        real, made = jnp.ones((batch.shape[0], 1)), jnp.zeros((batch.shape[0], 1))

        def run(name: str, params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            outputs, model_state = self.apply(params, state, x, module=name, training=True)
            return outputs, state.replace(model_state=model_state)

        images, state = run("generator", state.params["generator"], state, noise)

        def discriminator_loss(params: Any) -> tuple[jax.Array, Any]:
            of_real, after = run("discriminator", params, state, batch)
            of_made, after = run("discriminator", params, after, images)
            return self.logistic(real, of_real) + self.logistic(made, of_made), after.model_state

        gradient = jax.value_and_grad(discriminator_loss, has_aux=True)
        (d_loss, model_state), grads = gradient(state.params["discriminator"])
        state = state.apply_gradients(discriminator=grads, model_state=model_state)

        def generator_loss(params: Any) -> jax.Array:
            images, _ = run("generator", params, state, noise)
            return self.logistic(real, run("discriminator", state.params["discriminator"], state, images)[0])

        g_loss, grads = jax.value_and_grad(generator_loss)(state.params["generator"])
        return {"d_loss": d_loss, "g_loss": g_loss}, state.apply_gradients(generator=grads)

    def predict_step(self, state: Any, batch: Any) -> jax.Array:
        """Returns the images of a batch of noise."""
        return self.apply(state.params["generator"], state, batch, module="generator")[0]


def main() -> None:
    images = (load_digits().images / 8.0 - 1.0).astype(np.float32)[..., None]
    gan = DCGAN()
    gan.compile({"generator": optax.adam(1e-3, b1=0.5), "discriminator": optax.adam(5e-4, b1=0.5)})
    history = gan.fit(images, batch_size=64, epochs=30, verbose=2)
    made = gan.predict(np.random.default_rng(0).normal(size=(512, NOISE)).astype(np.float32), verbose=0)
    trainer.utils.save_img("made.png", np.concatenate(list(made[:10]), axis=1).repeat(8, axis=0).repeat(8, axis=1))
    print({name: values[-1] for name, values in history.history.items()} | {
        "difference_of_mean_images": float(np.abs(made.mean(0) - images.mean(0)).mean()),
        "spread_of_pixels": float(made.std(0).mean()), "spread_of_real_pixels": float(images.std(0).mean())})


if __name__ == "__main__":
    main()
