"""Errors for names and arguments of other libraries that classes and functions here lack, which say what to use.

Owns the wording; each room owns its table, from a name to the sentence that ends the error. `attach_stub` takes such a
table for the names of a module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from trainer.core.errors import near_hint

Function = TypeVar("Function", bound=Callable[..., Any])


class ForeignNames:
    """Base of classes whose objects lack names of another library.

    A class sets `_foreign_names`: the names that it and its subclasses lack, and the sentences that end the errors.

    >>> class Dataset(ForeignNames):
    ...     _foreign_names = {"cache": "Leave it out."}
    >>> Dataset().cache
    Traceback (most recent call last):
    AttributeError: 'Dataset' object has no attribute 'cache'. Leave it out.
    """

    _foreign_names: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __getattr__(self, name: str) -> Any:
            hint = _hint(type(self), name)
            if hint is None or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the error again, perhaps from within a property
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
            hint = _hint(cls, name)
            end = "" if hint is None else f". {hint}"
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}{end}", name=name, obj=cls)


def foreign_arguments(hints: Mapping[str, str]) -> Callable[[Function], Function]:
    """Returns a decorator of a function whose error for arguments that it does not take says what to do.

    Args:
      hints: names of arguments that the function lacks, and the sentences that end the errors. The sentence of "*" is
        for too many arguments by position.

    Raises:
      TypeError: from the decorated function.

    >>> @foreign_arguments({"buffer_size": "Leave it out."})
    ... def shuffle(seed=0): ...
    >>> shuffle(buffer_size=10)
    Traceback (most recent call last):
    TypeError: `shuffle` has no argument 'buffer_size'. Leave it out.
    """
    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _refusal(function, signature, kwargs, hints, error) from None
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _refusal(
    function: Callable[..., Any], signature: inspect.Signature, received: Mapping[str, Any], hints: Mapping[str, str],
    error: TypeError,
) -> TypeError:
    known = [name for name in signature.parameters if name not in ("self", "cls")]
    for name in received:
        if name not in known:
            return TypeError(f"`{function.__qualname__}` has no argument {name!r}. "
                             f"{hints.get(name) or near_hint(name, known)}")
    hint = "" if "missing" in str(error) else f" {hints.get('*', '')}"
    return TypeError(f"`{function.__qualname__}({', '.join(known)})`: {error}.{hint}".rstrip())


def _hint(kind: type, name: str) -> str | None:
    """Returns the sentence about a name that a class or a base of it lacks; None if there is none."""
    return next((each.__dict__["_foreign_names"][name] for each in kind.__mro__
                 if name in each.__dict__.get("_foreign_names", ())), None)
