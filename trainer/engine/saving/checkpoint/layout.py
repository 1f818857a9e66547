"""File names of a checkpoint, and the description of its arrays.

Owns the conventions that the writer and the reader share. Reads and writes nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

DOCUMENT = "document.json"
DOCUMENT_ARRAYS = "arrays.safetensors"
STATE = "state"
ORBAX = "default"  # the folder of the state in its place, under Orbax's name, and a key of the document
PROCESSES = "processes"  # in the document: how many have written the state

Spec = tuple[tuple[int, ...], np.dtype]  # a shape and a dtype


def specs_as_json(specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Returns the description of arrays by name, for JSON."""
    return {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in specs.items()}


def specs_from_json(described: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns shapes and dtypes from the result of `specs_as_json`."""
    return {name: (tuple(entry["shape"]), np.dtype(entry["dtype"])) for name, entry in described.items()}
