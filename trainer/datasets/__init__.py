"""Data sets to begin with, in Keras's form: `(x_train, y_train), (x_test, y_test)` as numpy arrays.

Owns where Keras's files are looked for, and how they are read: nothing in them is executed.
"""

from trainer.datasets import (
    boston_housing,
    breast_cancer,
    california_housing,
    cifar10,
    cifar100,
    diabetes,
    digits,
    fashion_mnist,
    imdb,
    iris,
    mnist,
    reuters,
    wine,
)

__all__ = [
    "boston_housing",
    "breast_cancer",
    "california_housing",
    "cifar10",
    "cifar100",
    "diabetes",
    "digits",
    "fashion_mnist",
    "imdb",
    "iris",
    "mnist",
    "reuters",
    "wine",
]
