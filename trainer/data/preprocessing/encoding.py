"""Encodings of indices of categories: one-hot, multi-hot and counts, with the shapes of Keras."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core.errors import describe
from trainer.data.preprocessing.layer import Array
from trainer.data.sources.arrays import DataError

ENCODINGS = ("one_hot", "multi_hot", "count")
DROPPED = -2  # an index that no encoding shows


def encode(indices: Array, output_mode: str, depth: int, dtype: np.dtype, weights: Array | None = None) -> Array:
    """Returns indices, or their encoding, with zeros for indices outside of `[0, depth)`.

    Args:
      indices: integers, on the host or in a JAX program.
      output_mode: "int" for the indices; "one_hot": `(..., 1)` and `(...)` give `(..., depth)`; "multi_hot" and
        "count": `(rows, n)` gives `(rows, depth)`, and `(n,)`, one row, gives `(depth,)`.
      depth: number of categories.
      dtype: dtype of the result.
      weights: for "count", the numbers to add instead of 1, of the shape of `indices`.

    Raises:
      DataError: for "multi_hot" and "count" of more than two axes.
    """
    if output_mode == "int":
        return indices.astype(dtype)
    if indices.ndim == 0:
        indices = indices.reshape(1)
    if output_mode == "one_hot":
        if indices.ndim > 1 and indices.shape[-1] == 1:
            indices = indices.reshape(indices.shape[:-1])
        places = jnp.arange(depth) if isinstance(indices, jax.Array) else np.arange(depth)
        return (indices[..., None] == places).astype(dtype)
    if indices.ndim > 2:
        raise DataError(f"output_mode={output_mode!r} takes indices of shape (rows, n) or (n,). Received: "
                        f"{describe(indices)}. Reshape them, or use output_mode='one_hot'.")
    if isinstance(indices, jax.Array):
        found = indices[..., None] == jnp.arange(depth)
        if output_mode == "multi_hot":
            return found.any(-2).astype(dtype)
        return jnp.where(found, 1 if weights is None else weights[..., None], 0).sum(-2).astype(dtype)
    rows = np.atleast_2d(indices)
    owners = np.repeat(np.arange(len(rows)), rows.shape[1])
    counts = counted(owners, rows.ravel(), (len(rows), depth), None if weights is None else np.ravel(weights))
    counts = counts > 0 if output_mode == "multi_hot" else counts
    return counts.astype(dtype).reshape(*indices.shape[:-1], depth)


def counted(
    owners: np.ndarray, indices: np.ndarray, shape: tuple[int, int], weights: np.ndarray | None = None
) -> np.ndarray:
    """Returns the count, or the total weight, of each index in each row, of shape `(rows, depth)`.

    Args:
      owners: the row of each index.
      indices: indices; indices outside of `[0, depth)` are left out.
      shape: `(rows, depth)`.
      weights: a number for each index; by default 1.
    """
    shown = (indices >= 0) & (indices < shape[1])
    places = owners[shown] * shape[1] + indices[shown]
    return np.bincount(places, None if weights is None else weights[shown], shape[0] * shape[1]).reshape(shape)
