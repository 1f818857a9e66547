"""Which server has which rows of a table, and in how many lengths rows are computed with."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Share(NamedTuple):
    """What one server has of some rows.

    Attributes:
      mask: which of the rows.
      places: where it has them.
    """

    mask: np.ndarray
    places: np.ndarray


def shares(numbers: np.ndarray, servers: int) -> list[Share]:
    """Returns the share of each server in rows of some numbers."""
    owners = numbers % servers
    return [Share(owners == index, numbers[owners == index] // servers) for index in range(servers)]


def padded_length(count: int) -> int:
    """Returns the length that so many rows are padded to: a power of two, as each length compiles."""
    return 2 ** math.ceil(math.log2(max(count, 1)))
