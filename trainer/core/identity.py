"""Comparing values by what they are, and not by what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Identity:
    """Equal to another that holds the very same object, which it keeps alive, so that nothing else takes its place.

    >>> one, other = [0], [0]
    >>> Identity(one) == Identity(one), Identity(one) == Identity(other)
    (True, False)
    """

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value
