"""The registry of penalties, and their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.core.registry import Registry
from trainer.regularizers.penalties import L1, L1L2, L2, OrthogonalRegularizer, Penalty, Regularizer

_REGISTRY: Registry[Penalty] = Registry(
    "regularizer", Regularizer, "regularizers",
    {"L1": L1, "L2": L2, "L1L2": L1L2, "OrthogonalRegularizer": OrthogonalRegularizer,
     "l1": L1, "l2": L2, "l1l2": L1L2, "l1_l2": L1L2, "orthogonal_regularizer": OrthogonalRegularizer},
    argument="regularizers", expected="a dict from path patterns to penalties, such as "
    "{'**/kernel': trainer.regularizers.L2(1e-4)}, whose values are penalties or functions")


def serialize(regularizer: Penalty) -> dict[str, Any]:
    """Returns the configuration of a penalty, in Keras's format.

    >>> serialize(L2(0.5))["config"]
    {'l2': 0.5}
    """
    return _REGISTRY.serialize(regularizer)


def deserialize(config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Penalty:
    """Returns the penalty for a configuration from `serialize`, of this package or of Keras.

    >>> deserialize(serialize(L2(0.5)))
    L2(l2=0.5)
    """
    return _REGISTRY.deserialize(config, custom_objects)


def get(identifier: object) -> Penalty | None:
    """Returns the penalty for an identifier, as Keras does.

    The identifier is a name, for a penalty with default factors; a class; a function; a configuration from `serialize`;
    or None for no penalty.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `identifier` has another type.

    >>> get("l2")
    L2(l2=0.01)
    """
    penalty: Penalty | None = _REGISTRY.get(identifier)
    return penalty
