"""Trains a network on the digits 0 to 4, and fine-tunes it for 5 to 9, of which it sees ten images each.

First the new classifier alone is trained, with all else frozen; then all layers, with a lower learning rate for the
pretrained layers. The result is compared with the same network, trained on these few images from random weights. Each
digit is at a random place of a larger image, so that other digits can teach the network to ignore the place.
"""

import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import models

SIDE = 14
BODY = ["Conv_0", "Conv_1", "Dense_0"]


def digits(first: int) -> list[np.ndarray]:
    """Returns images of five digits, for training and for testing, and their labels, from 0."""
    images, labels = load_digits().images.astype(np.float32) / 16, load_digits().target - first
    chosen = (labels >= 0) & (labels < 5)
    return train_test_split(images[chosen], labels[chosen], test_size=0.3, stratify=labels[chosen], random_state=0)


def moved(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns larger images that have the given ones at random places; float32 of shape `(rows, SIDE, SIDE, 1)`."""
    larger = np.zeros((len(images), SIDE, SIDE, 1), np.float32)
    for place, image in zip(larger, images, strict=True):
        top, left = rng.integers(0, SIDE - 8 + 1, 2)
        place[top:top + 8, left:left + 8, 0] = image
    return larger


def new_model() -> trainer.Model:
    """Returns a network for five classes, with random weights."""
    model = trainer.Model(models.CNN(num_classes=5, features=(16, 32), hidden=64))
    model.build(np.zeros((1, SIDE, SIDE, 1), np.float32))
    return model


def main() -> None:
    rng = np.random.default_rng(0)
    loss, metrics, adam = "sparse_categorical_crossentropy", ["accuracy"], trainer.optimizers.Adam

    images, _, labels, _ = digits(0)
    pretrained = new_model()
    pretrained.compile(adam(2e-3), loss, metrics=metrics)
    pretrained.fit(moved(np.tile(images, (8, 1, 1)), rng), np.tile(labels, 8), batch_size=64, epochs=10, verbose=2)

    images, test_images, labels, test_labels = digits(5)
    images, _, labels, _ = train_test_split(images, labels, train_size=50, stratify=labels, random_state=0)
    train, test = (moved(images, rng), labels), (moved(test_images, rng), test_labels)
    accuracy = {}

    model = new_model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits_0_to_4.safetensors"
        pretrained.save_weights(path)
        print(model.load_weights(path, patterns=BODY))

    model.compile(adam(3e-3), loss, metrics=metrics, freeze=BODY)
    model.fit(*train, batch_size=10, epochs=40, verbose=0)
    accuracy["accuracy_of_frozen"] = model.evaluate(*test, verbose=0)["accuracy"]

    model.compile({**{name: adam(3e-4) for name in BODY}, "classifier": adam(1e-3)}, loss, metrics=metrics)
    history = model.fit(*train, batch_size=10, epochs=80, initial_epoch=40, validation_data=test, verbose=0)
    history.plot().savefig("fine_tuning.png")
    accuracy["accuracy_of_fine_tuned"] = model.evaluate(*test, verbose=0)["accuracy"]

    scratch = new_model()
    scratch.compile(adam(1e-3), loss, metrics=metrics)
    scratch.fit(*train, batch_size=10, epochs=80, verbose=0)
    accuracy["accuracy_from_scratch"] = scratch.evaluate(*test, verbose=0)["accuracy"]
    print(accuracy)


if __name__ == "__main__":
    main()
