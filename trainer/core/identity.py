"""Comparison of values without equality, by identity or by configuration."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Identity:
    """Equal to another `Identity` of the same object. It keeps the object alive, so that its `id` is not reused.

    >>> one, other = [0], [0]
    >>> Identity(one) == Identity(one), Identity(one) == Identity(other)
    (True, False)
    """

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value


def configuration_key(value: object) -> Any:
    """Returns a hashable key that two values share only if they compute the same.

    Functions share a key if they have the same code and globals and, recursively, the same defaults and captured
    values, as the results of two calls of `optax.adam(1e-3)`. Numbers and strings share a key if they are equal and of
    the same type. All other values are compared by identity.

    >>> def scale_by(factor):
    ...     return lambda x: factor * x
    >>> configuration_key(scale_by(0.5)) == configuration_key(scale_by(0.5))
    True
    >>> configuration_key(scale_by(0.5)) == configuration_key(scale_by(2.0))
    False
    """
    return _key(value, frozenset())


def _key(value: object, parents: frozenset[int]) -> Any:
    if value is None or type(value) in (bool, int, str, bytes):
        return type(value), value
    if type(value) in (float, complex):
        return type(value), repr(value)  # 0.0 differs from -0.0, and NaN equals itself
    if id(value) in parents:  # a function that captures itself
        return Identity(value)
    parents |= {id(value)}
    if isinstance(value, types.FunctionType):
        cells = tuple(_key(_content(cell), parents) for cell in value.__closure__ or ())
        defaults = _key(value.__defaults__, parents), _key(tuple((value.__kwdefaults__ or {}).items()), parents)
        return value.__code__, id(value.__globals__), defaults, cells
    if isinstance(value, types.MethodType):
        return types.MethodType, _key(value.__func__, parents), _key(value.__self__, parents)
    if type(value) is functools.partial:
        return (functools.partial, _key(value.func, parents), _key(value.args, parents),
                _key(tuple(value.keywords.items()), parents))
    if isinstance(value, tuple):
        return type(value), tuple(_key(item, parents) for item in value)
    return Identity(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return cell


class ComparesByConfiguration:
    """Base class of objects that are equal if they have the same type and equal attribute keys.

    Such an object can be a static part of a pytree: functions compiled for an object also serve equal objects.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._attributes() == other._attributes()

    def __hash__(self) -> int:
        return hash(type(self))  # attributes such as a learning rate may change, but a hash must not

    def _attributes(self: Any) -> dict[str, Any]:
        return {name: value if isinstance(value, ComparesByConfiguration) else configuration_key(value)
                for name, value in vars(self).items()}
