"""Trains a small convolutional network on scikit-learn's digits and draws its learning curves.

Runs on all local accelerators; on a CPU-only machine, on eight simulated devices. The code of the model does not say on
how many: `MirroredStrategy` splits each batch, and any number of devices gives the same numbers. The last batch of an
epoch has 29 rows in place of 32, which counts as 29.
"""

import os

# Asks XLA for eight CPU devices. It is read when JAX's backend starts, so it has to stand before anything that uses
# JAX; accelerators are not affected by it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import models


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns (images, labels) for training and for testing, every digit in the same proportion in both."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0)
    return (train_images, train_labels), (test_images, test_labels)


def main() -> None:
    train, test = digits()
    strategy = trainer.distribute.MirroredStrategy()  # all local devices
    print(f"Training on {strategy.num_replicas_in_sync} replicas.")
    with strategy.scope():
        model = trainer.Model(models.CNN(num_classes=10))
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(*train, batch_size=32, epochs=20, shuffle=True, validation_data=test)
    history.plot().savefig("curves.png")
    print("Wrote curves.png.")
    print(model.evaluate(*test, verbose=0))


if __name__ == "__main__":
    main()
