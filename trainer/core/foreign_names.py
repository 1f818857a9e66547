"""Errors for names of other libraries that classes here lack, which say what to use.

Owns the wording; each room owns its table, from a name to the sentence that ends the error. `attach_stub` takes such a
table for the names of a module.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.core.errors import name_hint


class ForeignNames:
    """Base of classes whose objects lack names of another library.

    A class sets `_foreign_names`: the names that it and its subclasses lack, and the sentences that end the errors.

    >>> class Dataset(ForeignNames):
    ...     _foreign_names = {"cache": "Leave it out."}
    >>> Dataset().cache
    Traceback (most recent call last):
    AttributeError: 'Dataset' object has no attribute 'cache'. Leave it out.
    """

    __slots__ = ()  # for subclasses with slots

    _foreign_names: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __getattr__(self, name: str) -> Any:
            if (name.startswith("_") and foreign_hint(type(self), name) is None) or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the error again, perhaps from within a property
            hint = foreign_hint(type(self), name) or _similar_names(type(self), name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {hint}",
                                 name=name, obj=self)


class ForeignNamesOfClass(type):
    """Type of `ForeignNames` that are used on the class too, such as constructors.

    >>> class Dataset(ForeignNames, metaclass=ForeignNamesOfClass):
    ...     _foreign_names = {"range": "Give `np.arange(n)` to `from_arrays`."}
    >>> Dataset.range
    Traceback (most recent call last):
    AttributeError: type object 'Dataset' has no attribute 'range'. Give `np.arange(n)` to `from_arrays`.
    """

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            hint = foreign_hint(cls, name) or ("" if name.startswith("_") else _similar_names(cls, name))
            end = f". {hint}" if hint else ""
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}{end}", name=name, obj=cls)


def foreign_hint(kind: type, name: str) -> str | None:
    """Returns the sentence about a name that a class or a base of it lacks; None if there is none."""
    return next((each.__dict__["_foreign_names"][name] for each in kind.__mro__
                 if name in each.__dict__.get("_foreign_names", ())), None)


@functools.lru_cache(maxsize=1024)  # `hasattr(model, name)` in a loop
def _similar_names(kind: type, name: str) -> str:
    return name_hint(name, [known for known in dir(kind) if not known.startswith("_")])
