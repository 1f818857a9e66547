"""Texts of other processes, escaped where they come in, so that no message that names one needs care.

Owns what may reach a terminal or a log of what others say: no control characters, by which a text could steer the
terminal or look like a line of this process's own.
"""

from __future__ import annotations

import json
from typing import Any


def printable(text: str, newlines: bool = False) -> str:
    """Returns a text with what is not printable escaped, as in Python's string literals.

    Args:
      text: the text.
      newlines: leave line feeds as they are, such as in the text of an error.

    Example:
      >>> print(printable("a\\x1b[31mb\\nc"))
      a\\x1b[31mb\\nc
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or (newlines and char == "\n")
                   else char.encode("unicode_escape").decode() for char in text)


def received(document: str | bytes) -> Any:
    """Returns what a JSON document says, with all texts in it printable, each on one line.

    Raises:
      ValueError: if it is not JSON.
      RecursionError: if it is nested too deeply.

    Example:
      >>> received('{"name": "worker\\\\u0007"}')
      {'name': 'worker\\\\x07'}
    """
    return _with_printable_texts(json.loads(document))


def _with_printable_texts(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_with_printable_texts(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): _with_printable_texts(item) for key, item in value.items()}
    return value
