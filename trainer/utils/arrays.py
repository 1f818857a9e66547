"""Arrays of labels, vectors and sequences, as models take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from trainer.core import arguments
from trainer.core.errors import describe

_ENDS = ("pre", "post")


def to_categorical(x: ArrayLike, num_classes: int | None = None) -> np.ndarray:
    """Returns class indices as one-hot vectors.

    Args:
      x: class indices from 0 on, of any shape; a last axis of size 1 is left out.
      num_classes: how many classes there are; one more than the largest index where None.

    Returns:
      float64, `(*x.shape, num_classes)`.

    Raises:
      ValueError: for an index that is no class, and without indices and `num_classes`.

    >>> to_categorical([0, 2]).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    labels = np.asarray(x)
    if labels.size and not np.array_equal(labels, labels.astype(np.int64)):
        raise ValueError(f"`x` must hold class indices. Received: {describe(labels)} with fractions.")
    labels = labels.astype(np.int64)
    if labels.ndim > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if num_classes is None:
        if not labels.size:
            raise ValueError("`num_classes` is needed where there are no labels.")
        num_classes = int(labels.max()) + 1
    arguments.check_count("num_classes", num_classes)
    if labels.size and not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(f"`x` must hold class indices from 0 to {num_classes - 1}. Received: indices from "
                         f"{labels.min()} to {labels.max()}.")
    return np.eye(num_classes)[labels]


def normalize(x: ArrayLike, axis: int = -1, order: int | float = 2) -> np.ndarray:
    """Returns vectors scaled to a norm of 1; vectors of zeros stay.

    Args:
      x: the vectors.
      axis: the axis that they lie along.
      order: of the norm, as of `numpy.linalg.norm`; 2 is the Euclidean one.

    >>> normalize([[3.0, 4.0], [0.0, 0.0]]).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    values = np.asarray(x)
    norms = np.linalg.norm(values, order, axis, keepdims=True)
    return values / np.where(norms == 0, 1, norms)


def pad_sequences(
    sequences: Sequence[Any], maxlen: int | None = None, dtype: DTypeLike = "int32", padding: str = "pre",
    truncating: str = "pre", value: Any = 0.0,
) -> np.ndarray:
    """Returns sequences of different lengths as one array.

    Args:
      sequences: each a list or an array of numbers, or of vectors of one shape.
      maxlen: the length that all get; that of the longest where None.
      dtype: of the result. `object` holds strings.
      padding: whether short sequences are filled up before ("pre") or after ("post").
      truncating: whether long sequences lose their first values ("pre") or their last ("post").
      value: what fills them up.

    Returns:
      `(len(sequences), maxlen, ...)`.

    Raises:
      TypeError: for something that is no sequence.
      ValueError: for other words than "pre" and "post", and values of different shapes.

    >>> pad_sequences([[1], [2, 3], [4, 5, 6]], maxlen=2).tolist()
    [[0, 1], [2, 3], [5, 6]]
    """
    arguments.check_word("padding", padding, _ENDS)
    arguments.check_word("truncating", truncating, _ENDS)
    arguments.check_count("maxlen", maxlen, optional=True)
    for index, sequence in enumerate(sequences):
        if not hasattr(sequence, "__len__"):
            raise TypeError(f"`sequences` must hold sequences. Received: {describe(sequence)} at position {index}.")
    if isinstance(value, str) and np.dtype(dtype).kind not in "OUS":
        raise ValueError(f"`value` must be a number for dtype {np.dtype(dtype).name}. Received: {value!r}. For strings "
                         "give `dtype=object`.")
    length = max(map(len, sequences), default=0) if maxlen is None else maxlen
    shape = next((np.shape(sequence)[1:] for sequence in sequences if len(sequence)), ())
    padded = np.full((len(sequences), length, *shape), value, dtype)
    for index, sequence in enumerate(sequences):
        kept = np.asarray(sequence[max(len(sequence) - length, 0):] if truncating == "pre" else sequence[:length])
        if not len(kept):
            continue
        if kept.shape[1:] != shape:
            raise ValueError(f"All values must have the shape {shape}, that of the first. Received: {kept.shape[1:]} "
                             f"at position {index}.")
        padded[index, slice(length - len(kept), None) if padding == "pre" else slice(len(kept))] = kept
    return padded
