"""Penalties of weights, which `compile(regularizers=...)` adds to the loss, with Keras's names and numbers."""

from trainer.regularizers.penalties import (
    L1,
    L1L2,
    L2,
    OrthogonalRegularizer,
    Penalty,
    Regularizer,
    l1,
    l1_l2,
    l2,
    orthogonal_regularizer,
)
from trainer.regularizers.registry import deserialize, get, serialize

__all__ = [
    "L1",
    "L1L2",
    "L2",
    "OrthogonalRegularizer",
    "Penalty",
    "Regularizer",
    "deserialize",
    "get",
    "l1",
    "l1_l2",
    "l2",
    "orthogonal_regularizer",
    "serialize",
]
