"""Small files of numbers.

Owns their encoding. Knows nothing of their meaning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.core.errors import brief
from trainer.core.files import read_json, replace_file


def write(path: str, content: Mapping[str, Any]) -> None:
    """Replaces a file by plain values and arrays in one step; on return they are on the disk."""
    replace_file(path, json.dumps(content, default=_encoded))


def read(path: str, writer: str) -> dict[str, Any] | None:
    """Returns the content that `write` wrote; None without a file.

    Raises:
      ValueError: if the file has other content; the message names its `writer`.
    """
    try:
        content = read_json(path, os.path.dirname(path))
        return {name: _decoded(value) for name, value in dict(content).items()}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path!r} is not what {writer} has written: {brief(error)}. Delete it.") from error


def _encoded(value: object) -> Any:
    if isinstance(value, bytes | os.PathLike):
        return os.fsdecode(value)
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype.kind in "biuf":
        return array.item()
    if array.dtype == object:
        return str(value)
    return {"dtype": str(array.dtype), "values": array.tolist()}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"dtype", "values"}:
        return {name: _decoded(item) for name, item in value.items()}
    array, dtype = np.asarray(value["values"]), np.dtype(value["dtype"])
    return array if dtype.kind in "SU" else array.astype(dtype)
