"""Trains a dense or a convolutional network on MNIST.

    python examples/mnist.py --model cnn --data mnist.npz

`--data` is Keras's `mnist.npz`, or a folder with the four files of MNIST, such as `train-images-idx3-ubyte`, compressed
with gzip or not. Without it, scikit-learn's digits take MNIST's place: enlarged, and moved about in 28x28 pixels. It is
the shortest way from a file to a summary, the curves and the metrics of a test set.
"""

import argparse
import gzip
import zipfile
from pathlib import Path

import numpy as np

import trainer
from trainer import models

SIDE = 28
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
KEYS = ("x_train", "y_train", "x_test", "y_test")


def read_idx(folder: Path, name: str) -> np.ndarray:
    """Returns the bytes of a file in MNIST's format: two zeros, a code, the number of sizes, the sizes, the values."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise ValueError(f"{folder} has no file {name} or {name}.gz.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not compressed with gzip, or not whole: {error}.") from error
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError(f"{path} is no idx file of bytes: it begins with {content[:4].hex(' ')}.")
    values = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[start:start + 4], "big") for start in range(4, values, 4))
    if len(content) != values + np.prod(shape, dtype=int):
        raise ValueError(f"{path} is not whole: it has {len(content)} bytes for an array of shape {shape}.")
    return np.frombuffer(content, np.uint8, offset=values).reshape(shape)


def read_npz(path: Path) -> list[np.ndarray]:
    """Returns the arrays of a file like Keras's `mnist.npz`."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [arrays[key] for key in KEYS]
    except KeyError as error:
        raise ValueError(f"{path} must have the arrays {', '.join(KEYS)}: {error.args[0]}.") from error
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:  # np.load's, for a file that is no .npz file
        raise ValueError(f"{path} is not there, or no .npz file of numbers.") from error


def enlarged_digits() -> list[np.ndarray]:
    """Returns scikit-learn's digits as images like MNIST's: each for training at two places, for testing at one."""
    from sklearn.datasets import load_digits

    small, labels = load_digits().images, load_digits().target
    rng = np.random.default_rng(0)
    rows, test = np.split(rng.permutation(len(small)), [1500])
    parts = []
    for numbers in (np.tile(rows, 2), test):
        images = np.zeros((len(numbers), SIDE, SIDE), np.uint8)
        for image, number in zip(images, numbers, strict=True):
            top, left = rng.integers(1, 4, 2)
            image[top:top + 24, left:left + 24] = np.kron(small[number] * (255 / 16), np.ones((3, 3)))
        parts += [images, labels[numbers]]
    return parts


def mnist(data: Path | None) -> list[np.ndarray]:
    """Returns images, float32 of shape `(rows, 28, 28, 1)` from 0 to 1, and labels: for training, and for testing."""
    if data is None:
        print("No --data: scikit-learn's digits, enlarged and moved about, take MNIST's place.")
        parts = enlarged_digits()
    elif data.is_dir():
        parts = [read_idx(data, name) for name in FILES]
    else:
        parts = read_npz(data)
    for images, labels in (parts[:2], parts[2:]):
        if images.shape != (len(labels), SIDE, SIDE) or labels.ndim != 1:
            raise ValueError(f"{data} must have images of shape (rows, {SIDE}, {SIDE}) and labels of shape (rows,). "
                             f"It has {images.shape} and {labels.shape}.")
    return [part.astype(np.float32)[..., None] / 255 if part.ndim == 3 else part for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("dense", "cnn"), default="cnn")
    parser.add_argument("--data", type=Path, help="mnist.npz, or a folder of idx files")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    try:
        images, labels, test_images, test_labels = mnist(options.data)
    except ValueError as error:
        parser.error(str(error))

    network = models.MLP(num_classes=10) if options.model == "dense" else models.CNN(num_classes=10)
    model = trainer.Model(network)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(images, labels, batch_size=options.batch_size, epochs=options.epochs, verbose=2,
                        validation_data=(test_images, test_labels))
    history.plot().savefig("curves.png")
    model.summary()
    print({"rows": len(images), **model.evaluate(test_images, test_labels, verbose=0)})


if __name__ == "__main__":
    main()
