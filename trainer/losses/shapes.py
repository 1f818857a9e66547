"""Conversion of labels and predictions to arrays of one shape and one float dtype.

Owns Keras's rule for labels and predictions whose ranks differ by 1, and the error messages for invalid shapes. Must
not compute any loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_index

from trainer.core.errors import describe, wrong_type
from trainer.core.types import ArrayLike, PyTree
from trainer.losses.linear_logits import LinearLogits

Shape = tuple[int, ...]


def in_dtype(what: str, values: Any, dtype: DTypeLike | None) -> jax.Array:
    """Returns values as an array of the given dtype; None keeps their dtype.

    Raises:
      TypeError: if the values are complex and the dtype is real, because the imaginary parts would be dropped.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.complexfloating) and _is_complex(values):
        raise TypeError(f"{what} must be real numbers here. Received: complex numbers, {describe(values)}, whose "
                        "imaginary parts would be dropped. Give absolute values, or real and imaginary parts as two "
                        "features.")
    try:
        return as_array(values, dtype)
    except (TypeError, ValueError) as error:
        if isinstance(values, jax.core.Tracer):
            raise
        raise TypeError(f"{what} must be an array of numbers. Received: {describe(values)}.") from error


def as_array(values: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns values as an array of the given dtype; None keeps their dtype, or JAX's for it.

    Integers of 64 bits that would wrap around in JAX's 32 become floats, as Keras's losses cast them.

    >>> as_array(np.array([2**40, 1])).tolist(), as_array(np.array([2, 1])).dtype.name
    ([1099511627776.0, 1.0], 'int32')
    """
    if dtype is None and not isinstance(values, jax.Array) and hasattr(values, "dtype"):
        host = np.asarray(values)
        if host.dtype.kind in "iu" and host.dtype.itemsize == 8 and host.size:
            bounds = np.iinfo(jax.dtypes.canonicalize_dtype(host.dtype))
            dtype = None if bounds.min <= host.min() and host.max() <= bounds.max else jnp.float32
    return jnp.asarray(values, dtype)


def as_arrays(values: PyTree, dtype: DTypeLike | None = None, what: str = "Values") -> Any:
    """Returns `values` with arrays as leaves.

    Args:
      values: labels or predictions from a user: an array, a (nested) list of numbers, or a tree of arrays.
      dtype: dtype of the arrays; None keeps their dtype.
      what: name of the values in the error message.

    Raises:
      TypeError: see `in_dtype`.
    """
    if isinstance(values, LinearLogits):
        values = values.array()
    if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(values)):
        return jax.tree.map(lambda leaf: in_dtype(what, leaf, dtype), values)
    return values if values is None else in_dtype(what, values, dtype)


def _is_complex(values: ArrayLike) -> bool:
    return any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) if hasattr(leaf, "dtype") else isinstance(leaf, complex)
               for leaf in jax.tree.leaves(values))


def as_float(values: ArrayLike) -> jax.Array:
    """Returns `values` as an array of at least float32, because 16-bit floats cannot represent `1 - 1e-7`."""
    array = in_dtype("Labels and predictions", values, None)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def as_signed(values: ArrayLike) -> Any:
    """Returns `values` with integers cast to int32, or to int64 if needed (uint32 and 64 bits) and enabled in JAX.

    Labels are often uint8, where `1 - label` and `-label` wrap around silently. Class indices stay integers. Bools
    stay bools, for `jnp.where` and `~`; JAX raises an error if they are negated or subtracted.

    Args:
      values: an array, or a tree of arrays.

    >>> (1 - as_signed(jnp.array([0, 2], "uint8"))).tolist()
    [1, -1]
    """
    def signed(leaf: jax.Array) -> jax.Array:
        dtype = leaf.dtype
        if not jnp.issubdtype(dtype, jnp.integer):
            return leaf
        is_wide = dtype.itemsize == 8 or dtype == jnp.uint32
        return leaf.astype(jax.dtypes.canonicalize_dtype("int64") if is_wide else "int32")

    return jax.tree.map(signed, values)


def as_arguments(y_true: ArrayLike, y_pred: ArrayLike) -> tuple[Any, Any]:
    """Returns labels and predictions in the form for a user's function: signed, with matched ranks.

    Args:
      y_true: labels; see `as_arrays`.
      y_pred: predictions, likewise. Ranks are matched if both are single arrays.
    """
    y_true, y_pred = as_signed(as_arrays(y_true)), as_signed(as_arrays(y_pred))
    if isinstance(y_true, jax.Array) and isinstance(y_pred, jax.Array):
        return match_ranks(y_true, y_pred)
    return y_true, y_pred


def matched_shapes(true_shape: Shape, pred_shape: Shape) -> tuple[Shape, Shape]:
    """Returns the shapes of labels and predictions after Keras's rule adds or removes a last axis of size 1.

    The rule applies if the ranks differ by 1 and the longer shape ends in 1. A shape of rank 1 gets this axis;
    otherwise the longer shape loses it. All other shapes are unchanged.

    >>> matched_shapes((8,), (8, 1)), matched_shapes((8, 5), (8, 5, 1))
    (((8, 1), (8, 1)), ((8, 5), (8, 5)))
    """
    longer, shorter = sorted((true_shape, pred_shape), key=len, reverse=True)
    if len(longer) != len(shorter) + 1 or longer[-1] != 1:
        return true_shape, pred_shape
    if len(shorter) == 1:
        grown = (*shorter, 1)
        return (grown, pred_shape) if shorter is true_shape else (true_shape, grown)
    return (longer[:-1], pred_shape) if longer is true_shape else (true_shape, longer[:-1])


def match_ranks(y_true: jax.Array, y_pred: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both arrays, reshaped as in `matched_shapes`."""
    true_shape, pred_shape = matched_shapes(y_true.shape, y_pred.shape)
    return y_true.reshape(true_shape), y_pred.reshape(pred_shape)


def check_arrays(y_true: ArrayLike, y_pred: ArrayLike) -> None:
    """Raises TypeError unless both arguments have a shape and a dtype."""
    for argument, value in (("y_true", y_true), ("y_pred", y_pred)):
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise wrong_type(argument, value, "an array")


def check_same_shape(
    y_true: jax.Array, y_pred: jax.Array,
    fix: str = "Give one label for each number of `y_pred`, or the last layer one unit for each label.",
) -> None:
    """Raises ValueError unless labels and predictions have the same shape after `matched_shapes`.

    Args:
      y_true: anything with a shape.
      y_pred: anything with a shape.
      fix: last sentence of the error message, unless the labels are of whole rows and the predictions are not.
    """
    true_shape, pred_shape = matched_shapes(tuple(y_true.shape), tuple(y_pred.shape))
    if true_shape != pred_shape:
        fix = _fix_of_rows(tuple(y_true.shape), tuple(y_pred.shape)) or fix
        raise ValueError(f"`y_true` and `y_pred` must have the same shape. Received: y_true.shape="
                         f"{tuple(y_true.shape)}, y_pred.shape={tuple(y_pred.shape)}. {fix}")


def _fix_of_rows(true_shape: tuple[int, ...], pred_shape: tuple[int, ...]) -> str:
    """Returns a sentence for labels of rows, and predictions that have further axes; an empty string for others."""
    if len(pred_shape) < 3 or true_shape not in (pred_shape[:1], (*pred_shape[:1], 1)):
        return ""
    between = tuple(range(1, len(pred_shape) - 1))
    return ("For one label for each row, make one prediction for each: before the last layer, flatten by `lambda x: "
            f"x.reshape(len(x), -1)`, or average over the axes between by `lambda x: x.mean(axis={between})`. "
            "Otherwise give one label for each prediction.")


def as_float_pair(y_true: ArrayLike, y_pred: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns labels and predictions as arrays of one shape, in the float dtype of the predictions.

    Raises:
      ValueError: if their shapes differ, because broadcasting `(n, 1)` to `(n, k)` would hide a mistake.
    """
    y_pred = as_float(y_pred)
    y_true = in_dtype("`y_true`", y_true, y_pred.dtype)
    check_same_shape(y_true, y_pred)
    return match_ranks(y_true, y_pred)


def check_class_indices(y_true: jax.Array, y_pred: jax.Array, axis: int) -> None:
    """Raises ValueError unless `y_true` has the shape of `y_pred` with its class axis removed or of size 1."""
    pred_shape, true_shape = tuple(y_pred.shape), tuple(y_true.shape)
    class_axis = normalize_axis_index(axis, len(pred_shape))
    before, after = pred_shape[:class_axis], pred_shape[class_axis + 1:]
    flat, kept = (*before, *after), (*before, 1, *after)
    if true_shape in (flat, kept):
        return
    fix = ("The labels are one-hot: use CategoricalCrossentropy, or give `y_true.argmax(axis)`."
           if true_shape == pred_shape
           else _fix_of_rows(true_shape, pred_shape) or "Give one class index for each prediction.")
    raise ValueError(f"`y_true` must hold class indices of shape {flat} or {kept}, for y_pred.shape={pred_shape}. "
                     f"Received: y_true.shape={true_shape}. {fix}")


def class_indices(y_true: jax.Array, y_pred: jax.Array, axis: int) -> jax.Array:
    """Returns `y_true` as int32 class indices, in the shape of `y_pred` without its class axis.

    Raises:
      ValueError: if the shapes do not match.
    """
    y_true = as_array(y_true)
    check_class_indices(y_true, y_pred, axis)
    return (y_true if y_true.ndim < y_pred.ndim else y_true.squeeze(axis)).astype(jnp.int32)
