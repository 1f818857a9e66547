"""Builders of error messages, which state the received value, the expected values and a fix.

Owns wording that several modules share. Messages contain shapes, dtypes and types, never contents, so they stay short
and do not print a user's data.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainer.core.received_text import printable

DOCUMENTATION_URL = "https://trainer-jax.readthedocs.io/en/latest/"  # also in [project.urls] of pyproject.toml
MAX_ITEMS = 8  # maximum number of listed items in a message
_MAX_CHARACTERS = 200  # of a name or an error that comes from a file
_MAX_NEAR = 5  # maximum number of suggested names
_NEAR = 0.6
# Arguments of other libraries, or of earlier versions of Keras.
_ELSEWHERE = {
    "decay": "A learning rate that decays is a schedule: `trainer.optimizers.schedules.InverseTimeDecay(rate, "
             "decay_steps=1, decay_rate=decay)`; weights decay by 'weight_decay'.",
    **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "num_devices"), "Give `devices`, such as `jax.devices()[:2]`."),
    "betas": "Give `beta_1` and `beta_2`.",
    "period": 'Give `save_freq`: "epoch", or a number of batches.',
    "label_smoothing": "Labels that are class indices cannot be smoothed: give `CategoricalCrossentropy("
                       "label_smoothing=...)` one-hot labels, as `trainer.utils.to_categorical(y)` makes them.",
    "write_grads": "There are no histograms of gradients: `compile(log_norms=True)` logs their \"grad_norm\".",
}
_MALFORMED = (LookupError, TypeError, AttributeError, ValueError, RecursionError, ArithmeticError, EOFError,
              MemoryError, NotImplementedError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)
_WORDS = re.compile(r"[A-Z]*[a-z0-9]+|[A-Z]+")


@contextlib.contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Names a file in the errors of code that parses its content.

    Raises:
      ValueError: replaces any error about malformed content, unless the error already names the file.

    >>> with naming_file("state"):
    ...     {}["format_version"]
    Traceback (most recent call last):
    ValueError: 'state' is malformed (KeyError: 'format_version'). Save it again, or take another copy of it.
    """
    try:
        yield
    except _MALFORMED as error:
        if isinstance(error, ValueError) and repr(path) in str(error):
            raise
        raise ValueError(f"{path!r} is malformed ({type(error).__name__}: {brief(error)}). Save it again, or take "
                         "another copy of it.") from error


@contextlib.contextmanager
def named_in_errors(
    kind: str, name: str, output: str | None = None, y_true: object = None, y_pred: object = None
) -> Iterator[None]:
    """Adds a note with the name of a loss or a metric to errors raised in the block whose message lacks it.

    Args:
      kind: "loss" or "metric".
      name: its name.
      output: the name of its output, if the model has several.
      y_true: the labels that it received; None to leave them out of the note.
      y_pred: the predictions, likewise.
    """
    try:
        yield
    except Exception as error:
        if not all(repr(part) in str(error) for part in (name, output) if part is not None):
            of_output = "" if output is None else (
                f" of the output {output!r} (losses, metrics and targets in a list are in the order of the outputs)")
            received = "" if y_true is None else f" for (y_true, y_pred) = {describe((y_true, y_pred))}, in this order"
            error.add_note(f"It was raised by the {kind} {name!r}{of_output}{received}.")
        raise


def brief(text: object) -> str:
    r"""Returns a text that comes from a file, printable and on a line, without its middle if it is long.

    >>> brief("a\x1b[31m" + "b" * 300)[:12]
    'a\\x1b[31mbbb'
    """
    shown = printable(str(text))
    half = _MAX_CHARACTERS // 2
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:half]}...{shown[-half:]}"


def near_names(received: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Returns the names in `known` that are similar to `received`, the most similar first."""
    by_lowercase = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(received.lower(), by_lowercase, n=limit, cutoff=0.6)
    return [by_lowercase[match] for match in matches]


def unknown_name(argument: str, received: str, known: Iterable[str]) -> ValueError:
    """Returns the error for a name that is not in `known`, with up to five similar names, or all names if they are few.

    Args:
      argument: argument of the name, such as "optimizer".
      received: the received name.
      known: all accepted names.
    """
    return ValueError(f"Unknown {argument} {received!r}. {near_hint(received, known)}")


def unknown_argument(owner: str, received: str, known: Iterable[str], hint: str | None = None) -> TypeError:
    """Returns the error for an unknown keyword, with a hint, or similar names, which Python's own error lacks.

    Args:
      owner: the class or the function.
      received: the keyword.
      known: all accepted keywords.
      hint: a sentence about that keyword.

    >>> unknown_argument("Adam", "lr", ["self", "learning_rate", "beta_1"])
    TypeError("Adam has no argument 'lr'. Did you mean 'learning_rate'?")
    """
    names = [name for name in known if name != "self"]
    hint = hint or _ELSEWHERE.get(received) or _did_you_mean(_by_nearness(received, names))
    if not hint and len(names) > MAX_ITEMS:  # the first arguments are the main ones
        hint = f"It takes {', '.join(names[:_MAX_NEAR])}, and {len(names) - _MAX_NEAR} more arguments."
    hint = hint or (near_hint(received, names) if names else "It takes no arguments.")
    return TypeError(f"{owner} has no argument {received!r}. {hint}")


def near_hint(received: str, known: Iterable[str]) -> str:
    """Returns a hint with the names in `known` that are similar to an unknown name.

    Case and underscores do not count. A name that contains the other name, or abbreviates it, is similar, because users
    know names from other libraries.

    >>> near_hint("lr", ["learning_rate", "momentum", "name"])
    "Did you mean 'learning_rate'?"
    """
    found = _by_nearness(received, known)
    if near := _did_you_mean(found):
        return near
    nearest = list(found)
    if len(nearest) <= MAX_ITEMS:
        return f"Known names: {', '.join(sorted(nearest))}."
    return f"The nearest of {len(nearest)} known names: {', '.join(nearest[:_MAX_NEAR])}."


def name_hint(received: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown attribute: names in `known` that are similar, or the page that lists all names."""
    return _did_you_mean(_by_nearness(received, known)) or f"All names: {page_url('genindex')}"


def _by_nearness(received: str, known: Iterable[str]) -> dict[str, float]:
    """Returns the nearness of each name, the nearest first."""
    # Of several spellings, prefer the case of the received name.
    by_case = sorted(known, key=lambda name: (name.islower() == received.islower(), name))
    spellings = {_letters(name): name for name in by_case}
    nearness = {name: _nearness(received, name) for name in spellings.values()}
    return dict(sorted(nearness.items(), key=lambda item: (-item[1], item[0])))


def _did_you_mean(nearness: dict[str, float]) -> str:
    """Returns a question with the names that are near enough, or an empty string."""
    near = [repr(name) for name in list(nearness)[:_MAX_NEAR] if nearness[name] >= _NEAR]
    return f"Did you mean {' or '.join(near)}?" if near else ""


def _nearness(received: str, name: str) -> float:
    one, other = _letters(received), _letters(name)
    ratio = difflib.SequenceMatcher(None, one, other).ratio()
    initials = "".join(part[0] for part in _WORDS.findall(name)).lower()
    contains, is_contained = len(one) > 1 and one in other, len(other) > 2 and other in one
    return ratio + 2 * (one == initials) + contains + 0.2 * is_contained


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def page_url(page: str, section: str = "") -> str:
    """Returns the address of a page of the documentation, or of a section of it.

    >>> page_url("resume").removeprefix(DOCUMENTATION_URL)
    'resume.html'
    """
    return f"{DOCUMENTATION_URL}{page}.html{section and '#'}{section}"


def see(code: str) -> str:
    """Returns the end of a message that an entry of docs/errors.md explains: its address, and an offline command.

    The address ends before a space, so that terminals link to it.

    Args:
      code: heading of the entry.

    >>> see("monitor").removeprefix(f"See {DOCUMENTATION_URL}")
    'errors.html#monitor or run `python -m trainer explain monitor`.'
    """
    return f"See {page_url('errors', code)} or run `python -m trainer explain {code}`."


def missing_package(owner: str, package: str, extra: str) -> ImportError:
    """Returns the error for a package that cannot be imported, and that an extra of the trainer brings."""
    return ImportError(f"`{owner}` needs {package}, which cannot be imported. Install it with "
                       f"`pip install 'trainer-jax[{extra}]'`.")


def wrong_type(argument: str, received: object, expected: str) -> TypeError:
    """Returns the error for an argument of an unusable type."""
    text = f"the class {received.__name__}" if isinstance(received, type) else (
        f"a value of type {type(received).__name__}")
    return TypeError(f"`{argument}` must be {expected}. Received: {text}.")


def listed(what: str, names: Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """Returns a line with a few names, each with a similar name of `others`; an empty list for no names.

    >>> listed("missing", ["bias"], ["biases"])
    ['1 missing: bias (near: biases)']
    """
    shown = []
    for name in names[:MAX_ITEMS]:
        near = near_names(name, others, limit=1)
        shown.append(brief(name) + (f" (near: {brief(near[0])})" if near else ""))
    more = ", ..." if len(names) > MAX_ITEMS else ""
    return [f"{len(names)} {what}: {', '.join(shown)}{more}"] if names else []


def describe(value: object) -> str:
    """Returns the shape and dtype of a value, or its type, for an error message.

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
