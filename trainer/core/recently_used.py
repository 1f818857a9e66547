"""A dict of a bounded size, which drops the entry that was used the longest time ago."""

from __future__ import annotations

import collections
import contextlib
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentlyUsed(collections.OrderedDict[K, V]):
    """A dict that keeps the entries last written or read by `use`.

    Args:
      size: the largest number of entries.

    Example:
      >>> kept = RecentlyUsed(2)
      >>> kept["a"], kept["b"] = 1, 2
      >>> kept.use("a")
      1
      >>> kept["c"] = 3
      >>> list(kept), kept.use("b")
      (['a', 'c'], None)
    """

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def use(self, key: K) -> V | None:
        """Returns the value of a key, and makes it the last to be dropped; None for an unknown key."""
        with contextlib.suppress(KeyError):  # another thread may drop the entry meanwhile
            self.move_to_end(key)
        return self.get(key)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size:
            self.popitem(last=False)
