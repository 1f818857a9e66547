"""Penalties of weights, which `compile(regularizers=...)` adds to the loss, in Keras's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from trainer.core import arguments, configs, errors
from trainer.core.identity import ComparesByConfiguration

Penalty = Callable[[jax.Array], jax.Array]
"""Returns a scalar for an array of weights."""


class L1L2(ComparesByConfiguration):
    """The penalty `l1 * sum(abs(w)) + l2 * sum(w ** 2)` of an array of weights.

    Args:
      l1: the factor of the absolute values.
      l2: the factor of the squares.

    Raises:
      ValueError: if a factor is negative or not finite.
      TypeError: if it is not a number.

    Example:
      >>> float(L1L2(l1=1.0, l2=0.5)(jnp.array([-2.0, 1.0])))
      5.5

    Source: `keras.regularizers.L1L2`.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.0):
        arguments.require_non_negative(l1=l1, l2=l2)
        self.l1, self.l2 = float(l1), float(l2)

    def __call__(self, weights: jax.Array) -> jax.Array:
        """Returns the penalty, a scalar."""
        penalty = jnp.zeros((), jnp.promote_types(weights.dtype, jnp.float32))
        if self.l1:
            penalty += self.l1 * jnp.abs(weights).sum()
        if self.l2:
            penalty += self.l2 * jnp.square(weights).sum()
        return penalty

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal penalty."""
        return {"l1": self.l1, "l2": self.l2}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Returns the penalty that `get_config` described."""
        return cls(**config)

    def __repr__(self) -> str:
        factors = ", ".join(f"{name}={value}" for name, value in vars(self).items() if value)
        return f"{type(self).__name__}({factors})"


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


_BY_NAME: dict[str, type[L1L2]] = {"l1": L1, "l2": L2, "l1_l2": L1L2, "L1": L1, "L2": L2, "L1L2": L1L2}


def serialize(regularizer: Penalty) -> dict[str, Any]:
    """Returns a penalty as plain data, in Keras's form.

    >>> serialize(L2(0.5))["config"]
    {'l2': 0.5}
    """
    config: dict[str, Any] = configs.to_config(regularizer, "regularizers")
    return config


def deserialize(config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Penalty:
    """Returns the penalty that `serialize`, or that of Keras, has made plain data of.

    >>> deserialize(serialize(L2(0.5)))
    L2(l2=0.5)
    """
    penalty: Penalty = configs.from_config("regularizer", config, _BY_NAME, custom_objects)
    return penalty() if isinstance(penalty, type) else penalty


def get(identifier: Any) -> Penalty:
    """Returns the penalty that `identifier` names, as Keras does: a name with default factors, or a function.

    A configuration, as `serialize` returns it, is taken too.

    Raises:
      ValueError: for an unknown name.
      TypeError: for what is neither.

    >>> get("l2")
    L2(l2=0.01)
    """
    if configs.is_config(identifier):
        return deserialize(identifier)
    if isinstance(identifier, str):
        if identifier not in _BY_NAME:
            raise errors.unknown_name("regularizer", identifier, _BY_NAME)
        return _BY_NAME[identifier]()
    if not callable(identifier) or isinstance(identifier, type):
        raise errors.wrong_type("regularizers", identifier, "a dict from path patterns to penalties, such as "
                                "{'**/kernel': trainer.regularizers.L2(1e-4)}, whose values are penalties or functions")
    function: Penalty = identifier
    return function
