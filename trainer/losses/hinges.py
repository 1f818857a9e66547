"""Losses of maximum-margin classifiers.

Functions take labels and predictions, arrays or lists `(n, ..., features)` of any dtype, and return `(n, ...)`,
float32 or wider. They raise ValueError if the shapes differ by more than a last axis of size 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainer.core.types import ArrayLike
from trainer.losses.base import BuiltinLoss
from trainer.losses.shapes import as_float_pair


def hinge(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean(max(1 - y_true * y_pred, 0), axis=-1)`.

    Args:
      y_true: -1 or 1; labels that are all 0 or 1 are read as -1 or 1.
      y_pred: scores.

    >>> hinge([[-1, 1]], [[0.5, 2]]).tolist()
    [0.75]
    """
    return jnp.mean(_margin_errors(y_true, y_pred), axis=-1)


def squared_hinge(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean(max(1 - y_true * y_pred, 0)**2, axis=-1)`.

    Args:
      y_true: -1 or 1; labels that are all 0 or 1 are read as -1 or 1.
      y_pred: scores.

    >>> squared_hinge([[-1, 1]], [[0.5, 2]]).tolist()
    [1.125]
    """
    return jnp.mean(jnp.square(_margin_errors(y_true, y_pred)), axis=-1)


def categorical_hinge(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `max(1 + highest score of the other classes - score of the true class, 0)`.

    Args:
      y_true: one-hot labels, `(n, ..., classes)`.
      y_pred: scores of the same shape. As in Keras, the other classes include the true class, with a score of 0.

    >>> categorical_hinge([[0, 1, 0]], [[2, 1, 3]]).tolist()
    [3.0]
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    score = jnp.sum(y_true * y_pred, axis=-1)
    others = jnp.max((1.0 - y_true) * y_pred, axis=-1)
    return jnp.maximum(others - score + 1.0, 0.0)


def _margin_errors(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    y_true, y_pred = as_float_pair(y_true, y_pred)
    is_binary = jnp.all((y_true == 0) | (y_true == 1))
    signs = jnp.where(is_binary, 2.0 * y_true - 1.0, y_true)
    return jnp.maximum(1.0 - signs * y_pred, 0.0)


class Hinge(BuiltinLoss):
    """The hinge loss, with a margin of 1; see `hinge`, and `Loss` for the arguments.

    >>> float(Hinge()([[-1, 1]], [[0.5, 2]]))
    0.75
    """

    function = staticmethod(hinge)


class SquaredHinge(BuiltinLoss):
    """The square of the hinge loss; see `squared_hinge`, and `Loss` for the arguments.

    >>> float(SquaredHinge()([[-1, 1]], [[0.5, 2]]))
    1.125
    """

    function = staticmethod(squared_hinge)


class CategoricalHinge(BuiltinLoss):
    """The hinge loss of one-hot labels, with a margin of 1; see `categorical_hinge`, and `Loss` for the arguments.

    >>> float(CategoricalHinge()([[0, 1, 0]], [[2, 1, 3]]))
    3.0
    """

    function = staticmethod(categorical_hinge)
    needs_vectors = True
