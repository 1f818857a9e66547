"""Builders of error messages: what was received, what was expected, how to fix it.

Owns the wording that several modules share. Messages name shapes, dtypes and types, never contents, so that they
stay short and do not print a user's data.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MAX_ITEMS = 8  # of a container, in a message
_MAX_NEAR = 5  # names that could have been meant
_NEAR = 0.6
_WORDS = re.compile(r"[A-Z]*[a-z0-9]+|[A-Z]+")


@contextlib.contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Names a file in the errors of code that parses what the file says.

    Raises:
      ValueError: in place of any error of what is malformed, unless it names the file already.

    >>> with naming_file("state"):
    ...     {}["format_version"]
    Traceback (most recent call last):
    ValueError: 'state' is malformed (KeyError: 'format_version'). Save it again, or take another copy of it.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if repr(path) in str(error):
            raise
        raise ValueError(f"{path!r} is malformed ({type(error).__name__}: {error}). Save it again, or take another "
                         "copy of it.") from error


def near_names(received: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Returns the names in `known` that look like `received`, the nearest first."""
    by_lowercase = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(received.lower(), by_lowercase, n=limit, cutoff=0.6)
    return [by_lowercase[match] for match in matches]


def unknown_name(argument: str, received: str, known: Iterable[str]) -> ValueError:
    """Returns the error for a name that is not among `known`, with the five nearest at most, or all of a few.

    Args:
      argument: the argument that the name was given for, such as "optimizer".
      received: the name as it was given.
      known: every name that would have been accepted.
    """
    return ValueError(f"Unknown {argument} {received!r}. {near_hint(received, known)}")


def unknown_argument(owner: str, received: str, known: Iterable[str]) -> TypeError:
    """Returns the error for a keyword that a class does not take; Python's own would not say which name was meant.

    >>> unknown_argument("Adam", "lr", ["self", "learning_rate", "beta_1"])
    TypeError("Adam has no argument 'lr'. Did you mean 'learning_rate'?")
    """
    return TypeError(f"{owner} has no argument {received!r}. "
                     f"{near_hint(received, [name for name in known if name != 'self'])}")


def near_hint(received: str, known: Iterable[str]) -> str:
    """Returns which names could have been meant by one that is not among `known`.

    Spellings that differ in case and underscores are one name. A name is near if it contains the other, or abbreviates
    it, as users know names from other libraries.

    >>> near_hint("lr", ["learning_rate", "momentum", "name"])
    "Did you mean 'learning_rate'?"
    """
    # Of several spellings, the one in the received name's case.
    by_case = sorted(known, key=lambda name: (name.islower() == received.islower(), name))
    spellings = {_letters(name): name for name in by_case}
    nearness = {name: _nearness(received, name) for name in spellings.values()}
    nearest = sorted(nearness, key=lambda name: (-nearness[name], name))
    near = [repr(name) for name in nearest[:_MAX_NEAR] if nearness[name] >= _NEAR]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if len(nearest) <= MAX_ITEMS:
        return f"Known names: {', '.join(sorted(nearest))}."
    return f"The nearest of {len(nearest)} known names: {', '.join(nearest[:_MAX_NEAR])}."


def _nearness(received: str, name: str) -> float:
    one, other = _letters(received), _letters(name)
    ratio = difflib.SequenceMatcher(None, one, other).ratio()
    initials = "".join(part[0] for part in _WORDS.findall(name)).lower()
    contains, is_contained = len(one) > 1 and one in other, len(other) > 2 and other in one
    return ratio + 2 * (one == initials) + contains + 0.2 * is_contained


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def see(code: str) -> str:
    """Returns the sentence that sends a reader to an entry of docs/errors.md.

    Args:
      code: the entry's heading.

    >>> see("monitor")
    'See docs/errors.md#monitor.'
    """
    return f"See docs/errors.md#{code}."


def wrong_type(argument: str, received: Any, expected: str) -> TypeError:
    """Returns the error for an argument of a type that cannot be used."""
    return TypeError(f"`{argument}` must be {expected}. Received: a value of type {type(received).__name__}.")


def listed(what: str, names: Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """Returns one line with a few of the names, each with the name among `others` that looks like it; no line for no
    names.

    >>> listed("missing", ["bias"], ["biases"])
    ['1 missing: bias (near: biases)']
    """
    shown = []
    for name in names[:MAX_ITEMS]:
        near = near_names(name, others, limit=1)
        shown.append(f"{name} (near: {near[0]})" if near else name)
    more = ", ..." if len(names) > MAX_ITEMS else ""
    return [f"{len(names)} {what}: {', '.join(shown)}{more}"] if names else []


def describe(value: Any) -> str:
    """Returns a value's shape and dtype, or its type, for an error message.

    >>> describe(3)
    'int'
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"array of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, dict):
        return "{" + _join([f"{key!r}: {describe(item)}" for key, item in _first(value.items())], len(value)) + "}"
    if isinstance(value, (tuple, list)):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return opening + _join([describe(item) for item in _first(value)], len(value)) + closing
    return type(value).__name__


def _first(items: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(items, MAX_ITEMS))


def _join(parts: list[str], length: int) -> str:
    return ", ".join(parts if length <= MAX_ITEMS else [*parts, f"... ({length} in all)"])
