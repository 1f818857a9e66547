"""Escapes texts of other processes on arrival, so that all messages can print them.

Texts without control characters can neither steer the terminal nor look like a line of this process.
"""

from __future__ import annotations

import json
from typing import Any


def printable(text: str, newlines: bool = False) -> str:
    """Returns a text with non-printable characters escaped, as in Python's string literals.

    Args:
      text: the text.
      newlines: whether to keep line feeds, such as in the text of an error.

    Example:
      >>> print(printable("a\\x1b[31mb\\nc"))
      a\\x1b[31mb\\nc
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or (newlines and char == "\n")
                   else char.encode("unicode_escape").decode() for char in text)


def received(document: str | bytes) -> Any:
    """Returns the value of a JSON document, with all strings printable and on a single line.

    Raises:
      ValueError: the document is not JSON.
      RecursionError: the document is nested too deeply.

    Example:
      >>> received('{"name": "worker\\\\u0007"}')
      {'name': 'worker\\\\x07'}
    """
    return _with_printable_texts(json.loads(document))


def _with_printable_texts(value: object) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_with_printable_texts(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): _with_printable_texts(item) for key, item in value.items()}
    return value
