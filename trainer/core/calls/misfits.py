"""Errors for arguments that do not fit a function: what it is called, what is missing or unknown, and what to write.

Owns the wording; `entry_points.py` has the decorators.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.core.errors import unknown_argument

_FUNCTION = re.compile(r"^[\w.<>]*\(\)")  # in Python's errors


def is_misfit(
    function: Callable[..., Any], args: tuple[Any, ...], received: Mapping[str, Any], error: TypeError
) -> bool:
    """Returns whether an error is Python's, for arguments that do not fit the signature; Flax raises it deeper."""
    if not _FUNCTION.match(str(error)):
        return False
    try:
        inspect.signature(function).bind(*args, **received)
    except TypeError:
        return True
    return False


def misfit(
    function: Callable[..., Any], args: tuple[Any, ...], received: Mapping[str, Any], hints: Mapping[str, str],
    error: TypeError,
) -> TypeError:
    """Returns the error for arguments that do not fit, with the name that the script knows, and a hint."""
    called = f"`{_called(function, args)}`"
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    text = _FUNCTION.sub(called, str(error))
    name = next((name for name in received if name not in known), None)
    if name is not None and "missing" not in text:
        return unknown_argument(called, name, known, hints.get(name))
    if "were given" in text or "multiple values" in text:  # too many by position
        hint = hints.get("*")
    else:
        absent = [name for name in known if f"'{name}'" in text]
        hint = next((hints[name] for name in absent if name in hints), None) or _documented(function, args, absent)
    return TypeError(text if hint is None else f"{text}. {hint}")


def _documented(function: Callable[..., Any], args: tuple[Any, ...], absent: list[str]) -> str | None:
    """Returns the first sentence of the docstrings about the first of some arguments, or the sentence that names it."""
    documented = type(args[0]).__mro__[:-1] if function.__name__ == "__init__" else (function,)
    texts = [inspect.cleandoc(each.__doc__ or "") for each in documented]
    for name in absent:
        for text in texts:
            found = re.search(rf"^  {name}: (.*(?:\n    .*)*)", text, re.M)
            if found:
                words = re.split(r"(?<=[.:]) +(?=[A-Z])", " ".join(found[1].split()))[0].rstrip(".")
                return f"`{name}`: {words}."
        if texts and f"`{name}`" in texts[0].partition("\n")[0]:
            return texts[0].partition("\n")[0]
    return None


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Returns the name of a method in the public class of its object, not in the base that defines the method."""
    public = [each for each in type(args[0]).__mro__ if each.__module__.startswith("trainer.")] if args else []
    is_method = public and any(hasattr(each, function.__name__) for each in public)
    name = f"{public[0].__name__}.{function.__name__}" if is_method else function.__qualname__
    return name.removesuffix(".__init__")
