"""Comparing values that have no equality of their own: by what they are, or by how they were made."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Identity:
    """Equal to another that holds the very same object, which it keeps alive, so that nothing else takes its place.

    >>> one, other = [0], [0]
    >>> Identity(one) == Identity(one), Identity(one) == Identity(other)
    (True, False)
    """

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value


def configuration_key(value: Any) -> Any:
    """Returns a hashable key that two values share only if they compute the same.

    Functions share it that have the same code and globals and, recursively, the same defaults and captured values, as
    two calls of `optax.adam(1e-3)` return them; numbers and strings that are equal, and of one type. Whatever else is
    compared by identity.

    >>> def scale_by(factor):
    ...     return lambda x: factor * x
    >>> configuration_key(scale_by(0.5)) == configuration_key(scale_by(0.5))
    True
    >>> configuration_key(scale_by(0.5)) == configuration_key(scale_by(2.0))
    False
    """
    return _key(value, frozenset())


def _key(value: Any, parents: frozenset[int]) -> Any:
    if value is None or type(value) in (bool, int, str, bytes):
        return type(value), value
    if type(value) in (float, complex):
        return type(value), repr(value)  # tells 0.0 from -0.0, and a NaN is equal to itself
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
    except ValueError:  # not assigned yet
        return cell


class ComparesByConfiguration:
    """A base of objects that are equal if they are of one type and all their attributes have the same keys.

    Such an object can be a static part of a pytree: functions that were compiled for an object serve equal objects too.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._attributes() == other._attributes()

    def __hash__(self) -> int:
        return hash(type(self))  # attributes may be set, such as a learning rate: a hash may not change

    def _attributes(self: Any) -> dict[str, Any]:
        return {name: value if isinstance(value, ComparesByConfiguration) else configuration_key(value)
                for name, value in vars(self).items()}
