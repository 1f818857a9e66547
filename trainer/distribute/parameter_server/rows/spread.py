"""Distribution of a table's rows over servers, and padded lengths of rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Share(NamedTuple):
    """Mask of the rows that a server has, and their places on the server."""

    mask: np.ndarray
    places: np.ndarray


def shares(numbers: np.ndarray, servers: int) -> list[Share]:
    """Returns the share of each server in rows with these indices."""
    owners = numbers % servers
    return [Share(owners == index, numbers[owners == index] // servers) for index in range(servers)]


def padded_length(count: int) -> int:
    """Returns the padded length of this number of rows: a power of two, because each length compiles separately."""
    return 2 ** math.ceil(math.log2(max(count, 1)))
