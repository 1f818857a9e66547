"""Trains a variational autoencoder on scikit-learn's digits and compares reconstructions with the mean image.

The module sows its divergence as a loss, which `fit` and `evaluate` add to the loss of `compile`. The decoder alone,
called with `apply(..., method="decode")`, then draws the digits of random latents, in `made.png`. Kingma and Welling,
"Auto-encoding variational Bayes", https://arxiv.org/abs/1312.6114.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import models


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns images for training and for testing, float32 of shape `(rows, 8, 8, 1)` with values from 0 to 1."""
    images = (load_digits().images / 16.0).astype(np.float32)[..., None]
    return train_test_split(images, test_size=0.2, random_state=0)


def main() -> None:
    train, test = digits()
    vae = models.VAE(image_shape=train.shape[1:], latent_dim=8, features=(16, 32), hidden=64)
    model = trainer.Model(vae)
    # The divergence, which the module sows, is part of the loss: of `fit` and of `evaluate`.
    model.compile(optimizer=trainer.optimizers.Adam(3e-3), loss="binary_crossentropy", metrics=["mse"])
    model.fit(train, train, batch_size=64, epochs=20, validation_data=(test, test), verbose=2)
    metrics = model.evaluate(test, test, verbose=0)

    latents = np.random.default_rng(0).normal(size=(10, vae.latent_dim)).astype(np.float32)
    made = np.asarray(vae.apply({"params": model.state.params}, latents, method="decode"))
    trainer.utils.save_img("made.png", np.concatenate(list(made), axis=1).repeat(8, axis=0).repeat(8, axis=1))
    print({**metrics, "mse_of_mean_image": float(np.square(test - train.mean(0)).mean())})


if __name__ == "__main__":
    main()
