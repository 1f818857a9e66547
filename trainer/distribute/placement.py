"""Batches on devices, and the padding that makes their rows divide by the number of replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

REPLICA_AXIS = "replica"  # the axis of every strategy's mesh over which rows are split


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """A group of batches on the devices.

    Attributes:
      data: a tree of arrays `(batches, rows, ...)`, rows split over the replicas.
      mask: float32 of shape `(rows,)`, 0.0 for rows that pad; None if there are none.
      device_count: `count` as an int32 scalar on the devices.
      count: how many batches are real.
      rows: how many rows of each batch are real.
      first: the number in its epoch of the first batch.
    """

    data: Any
    mask: jax.Array | None
    device_count: jax.Array
    count: int
    rows: int
    first: int


def pad_rows(array: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Returns `array` with `axis` grown to `size` by repeating its entries from the first on."""
    return np.take(array, np.arange(size) % array.shape[axis], axis=axis)
