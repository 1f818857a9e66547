"""The base class of weight penalties, and Keras's penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from trainer.core import arguments
from trainer.core.identity import ComparesByConfiguration
from trainer.core.types import ArrayLike

Penalty = Callable[[jax.Array], jax.Array]
"""Returns a scalar for an array of weights."""


class Regularizer(ComparesByConfiguration):
    """The base class of penalties of an array of weights.

    Subclasses define `__call__`, and `get_config` if they have arguments.

    Example:
      >>> class Distance(Regularizer):
      ...     def __init__(self, to):
      ...         self.to = to
      ...     def __call__(self, weights):
      ...         return jnp.abs(weights - self.to).sum()
      ...     def get_config(self):
      ...         return {"to": self.to}
      >>> float(Distance(to=1.0)(jnp.array([0.0, 3.0])))
      3.0

    Source: `keras.regularizers.Regularizer`.
    """

    def __call__(self, weights: jax.Array) -> jax.Array:
        """Returns the penalty of an array, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} must define `__call__(self, weights)`, which returns the "
                                  "penalty, a scalar.")

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a penalty from the result of `get_config`."""
        return cls(**config)

    def __repr__(self) -> str:
        given = self.get_config() or vars(self)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class L1L2(Regularizer):
    """The penalty `l1 * sum(abs(w)) + l2 * sum(w ** 2)` of an array of weights.

    Args:
      l1: factor of the absolute values.
      l2: factor of the squares.

    Raises:
      ValueError: if a factor is negative or not finite.
      TypeError: if a factor is not a number.

    Example:
      >>> float(L1L2(l1=1.0, l2=0.5)(jnp.array([-2.0, 1.0])))
      5.5

    Source: `keras.regularizers.L1L2`.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.0):
        arguments.require_non_negative(l1=l1, l2=l2)
        self.l1, self.l2 = float(l1), float(l2)

    def __call__(self, weights: ArrayLike) -> jax.Array:
        weights = jnp.asarray(weights)
        penalty = jnp.zeros((), jnp.promote_types(weights.dtype, jnp.float32))
        if self.l1:
            penalty += self.l1 * jnp.abs(weights).sum()
        if self.l2:
            penalty += self.l2 * jnp.square(weights).sum()
        return penalty

    def get_config(self) -> dict[str, Any]:
        return {"l1": self.l1, "l2": self.l2}


class L1(L1L2):
    """The penalty `l1 * sum(abs(w))`; see `L1L2`.

    >>> float(L1(0.5)(jnp.array([-2.0, 1.0])))
    1.5
    """

    def __init__(self, l1: float = 0.01):
        super().__init__(l1=l1)

    def get_config(self) -> dict[str, Any]:
        return {"l1": self.l1}


class L2(L1L2):
    """The penalty `l2 * sum(w ** 2)`; see `L1L2`.

    >>> float(L2(0.5)(jnp.array([-2.0, 1.0])))
    2.5
    """

    def __init__(self, l2: float = 0.01):
        super().__init__(l2=l2)

    def get_config(self) -> dict[str, Any]:
        return {"l2": self.l2}


class OrthogonalRegularizer(Regularizer):
    """The mean absolute cosine similarity of all pairs of rows (or columns) of a weight matrix, times a factor.

    Args:
      factor: factor of the mean.
      mode: "rows" or "columns".

    Raises:
      ValueError: if the factor is negative or not finite, the mode is unknown, or the weights are not a matrix.
      TypeError: if the factor is not a number, or the mode is not a string.

    Example:
      >>> float(OrthogonalRegularizer(factor=1.0)(jnp.array([[2.0, 0.0], [0.0, 3.0], [0.0, -1.0]]))).__round__(4)
      0.3333

    Source: `keras.regularizers.OrthogonalRegularizer`.
    """

    def __init__(self, factor: float = 0.01, mode: str = "rows"):
        arguments.require_non_negative(factor=factor)
        self.factor, self.mode = float(factor), arguments.check_word("mode", mode, ("rows", "columns"))

    def __call__(self, weights: ArrayLike) -> jax.Array:
        weights = jnp.asarray(weights)
        if weights.ndim != 2:
            raise ValueError("OrthogonalRegularizer is a penalty of matrices. Received: weights of shape "
                             f"{weights.shape}. Give it for the paths of those: `{{'dense/kernel': ...}}`.")
        vectors = weights if self.mode == "rows" else weights.T
        squares = jnp.square(vectors).sum(axis=1, keepdims=True)
        vectors *= jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
        cosines = vectors @ vectors.T * (1 - jnp.eye(len(vectors), dtype=vectors.dtype))
        pairs = max(len(vectors) * (len(vectors) - 1) / 2, 1)
        return self.factor * 0.5 * jnp.abs(cosines).sum() / pairs

    def get_config(self) -> dict[str, Any]:
        return {"factor": self.factor, "mode": self.mode}


l1, l2, l1_l2, orthogonal_regularizer = L1, L2, L1L2, OrthogonalRegularizer  # Keras's aliases
