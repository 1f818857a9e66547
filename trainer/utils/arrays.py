"""Arrays of labels, vectors and sequences for models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe

_ENDS = ("pre", "post")


@explains_arguments
@arguments.checked
def to_categorical(x: ArrayLike, num_classes: int | None = None) -> np.ndarray:
    """Converts class indices to one-hot vectors.

    Args:
      x: class indices, from 0, of any shape; a last axis of size 1 is removed.
      num_classes: number of classes; None for the largest index plus 1.

    Returns:
      Array of float64, `(*x.shape, num_classes)`.

    Raises:
      ValueError: for an index that is not a class, or without indices and `num_classes`.

    >>> to_categorical([0, 2]).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    labels = arguments.as_numbers("x", x)
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
                         f"{labels.min()} to {labels.max()}. Number the classes from 0, or give "
                         f"num_classes={max(int(labels.max()), 0) + 1}.")
    return np.eye(num_classes)[labels]


@explains_arguments
@arguments.checked
def normalize(x: ArrayLike, axis: int = -1, order: int | float = 2) -> np.ndarray:
    """Scales vectors to a norm of 1; zero vectors are unchanged.

    Args:
      x: array of vectors.
      axis: axis of the vectors.
      order: order of the norm, as in `numpy.linalg.norm`; 2 is the Euclidean norm.

    >>> normalize([[3.0, 4.0], [0.0, 0.0]]).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    values = arguments.as_numbers("x", x)
    if order is not None:  # NumPy's default
        arguments.require_number(order=order)
    norms = np.linalg.norm(values, order, axis, keepdims=True)
    return values / np.where(norms == 0, 1, norms)


@explains_arguments
@arguments.checked
def pad_sequences(
    sequences: Sequence[Any], maxlen: int | None = None, dtype: DTypeLike = "int32", padding: str = "pre",
    truncating: str = "pre", value: Any = 0.0,
) -> np.ndarray:
    """Pads or truncates sequences of different lengths to an array.

    Args:
      sequences: lists or arrays of numbers, or of vectors of one shape.
      maxlen: length of all sequences; None for the length of the longest.
      dtype: dtype of the result. `object` holds strings.
      padding: "pre" to pad short sequences at the beginning, "post" at the end.
      truncating: "pre" to remove the first values of long sequences, "post" the last values.
      value: padding value.

    Returns:
      Array of shape `(len(sequences), maxlen, ...)`.

    Raises:
      TypeError: if an element is not a sequence, or is text.
      ValueError: for other words than "pre" and "post", values of different shapes, or fractions in a dtype
        of whole numbers.

    >>> pad_sequences([[1], [2, 3], [4, 5, 6]], maxlen=2).tolist()
    [[0, 1], [2, 3], [5, 6]]
    """
    arguments.check_word("padding", padding, _ENDS)
    arguments.check_word("truncating", truncating, _ENDS)
    arguments.check_count("maxlen", maxlen, optional=True)
    for index, sequence in enumerate(sequences):
        if isinstance(sequence, (str, bytes)):
            raise _of_text("text", index)
        if not hasattr(sequence, "__len__"):
            raise TypeError(f"`sequences` must hold sequences. Received: {describe(sequence)} at position {index}.")
    if dtype is not None:
        arguments.as_dtype("dtype", dtype)
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
        if kept.dtype.kind in "US" and padded.dtype.kind not in "OUS":
            raise _of_text("strings", index)
        if kept.shape[1:] != shape:
            raise ValueError(f"All values must have the shape {shape}, as the first. Received: {kept.shape[1:]} "
                             f"at position {index}.")
        if padded.dtype.kind in "iu" and kept.dtype.kind == "f" and (kept != np.trunc(kept)).any():
            raise ValueError(f"`dtype` is {padded.dtype.name}, which would cut the fractions of the values at position "
                             f"{index}. Give `dtype=\"float32\"`.")
        padded[index, slice(length - len(kept), None) if padding == "pre" else slice(len(kept))] = kept
    return padded


def _of_text(received: str, index: int) -> TypeError:
    return TypeError(f"`sequences` must hold sequences of numbers. Received: {received} at position {index}. Make "
                     "numbers of it first: by a tokenizer, or `trainer.data.preprocessing.TextVectorization`, which "
                     "pads too. `dtype=object` takes lists of strings.")
