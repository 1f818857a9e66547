"""What the files of one checkpoint are called, and how it describes its arrays.

Owns what the writer and the reader must agree on. Reads and writes nothing itself.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np

DOCUMENT = "document.json"
DOCUMENT_ARRAYS = "arrays.safetensors"
STATE = "state"
PROCESSES = "processes"  # in the document: how many have written the state

Spec = tuple[tuple[int, ...], np.dtype]  # a shape and a dtype


def item_name(name: str) -> str:
    """Returns what older versions call an array inside of an Orbax item: other names for other arrays, no separators.

    >>> item_name("encoder/Dense_0/kernel")
    'encoder%2FDense_0%2Fkernel'
    """
    # A dot joins the parts of a nested name in Orbax, and urllib leaves it as it is.
    return urllib.parse.quote(name, safe="", errors="surrogatepass").replace(".", "%2E") or "%"


def is_in_state(spec: Spec) -> bool:
    """Tells whether Orbax has saved an array, which rejects those without elements: their description is enough."""
    return math.prod(spec[0]) > 0


def specs_as_json(specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Returns the description of arrays by name, for JSON."""
    return {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in specs.items()}


def specs_from_json(described: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns shapes and dtypes from what `specs_as_json` returned."""
    return {name: (tuple(entry["shape"]), np.dtype(entry["dtype"])) for name, entry in described.items()}
