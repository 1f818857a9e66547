"""Vocabularies: words from a file, and their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.core.errors import naming_file
from trainer.core.files import read_file

UNKNOWN = -1
_MOST_BYTES = 2**30  # of a vocabulary


def read_vocabulary(path: str) -> list[bytes]:
    """Returns the lines of a file, without their ends; the end of the last line does not begin another line.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is larger than 1 GiB.
    """
    with naming_file(path):
        content = read_file(path, most_bytes=_MOST_BYTES)
        return content.replace(b"\r", b"").removesuffix(b"\n").split(b"\n") if content else []


def positions(ids: Mapping[Any, int], words: Sequence[Any]) -> np.ndarray:
    """Returns the id of each word as int64; `UNKNOWN` for other words.

    >>> positions({"red": 0, "green": 1}, ["green", "blue"]).tolist()
    [1, -1]
    """
    return np.fromiter((ids.get(word, UNKNOWN) for word in words), np.int64, len(words))


def is_missing(value: object) -> bool:
    """Returns whether a value of a table is missing: None, NaN, or pandas' NA and NaT.

    >>> [is_missing(value) for value in (None, float("nan"), "", 0)]
    [True, True, False, False]
    """
    # pandas' types by name, to avoid the import
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value)
