"""Which server has which rows of a table."""

from __future__ import annotations

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
