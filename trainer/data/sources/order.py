"""The order of elements as arithmetic on their numbers: shuffle, repeat, take.

Owns the mapping from a position in a pass to the number of an element. It must not touch data, so that any position of
any pass is found without reading what comes before it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, TypeGuard

import numpy as np

Count = int | float
"""A number of elements; `math.inf` if there is no end to them."""

Run = tuple[int, np.ndarray]
"""A pass number, and positions within that pass."""


def is_finite(count: Count | None) -> TypeGuard[int]:
    """Returns whether `count` is a number: neither endless nor, as None says, unknown."""
    return count is not None and count != math.inf


def clip(position: int, count: Count) -> int:
    """Returns `position`, or `count` if that comes first."""
    return min(position, count) if is_finite(count) else position


class Step(Protocol):
    """One change of order."""

    @property
    def length(self) -> Count:
        """How many elements it yields in a pass."""

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        """Returns where, in the elements that this step reorders, those at `positions` come from."""


class Shuffle:
    """Another permutation in each pass, a function of (seed, pass) alone."""

    def __init__(self, length: int, seed: int):
        self.length = length
        self._seed = seed
        self._last: tuple[int, np.ndarray] | None = None

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        last = self._last
        if last is None or last[0] != pass_index:
            last = pass_index, np.random.default_rng([self._seed, pass_index]).permutation(self.length)
            self._last = last
        return [(pass_index, last[1][positions])]


class Repeat:
    """Passes over and over; `times` is None for endlessly. Each repetition is another pass of what is repeated."""

    # An endless pass has no last repetition; so many keep the repetitions of one pass apart from those of the next.
    _ENDLESS = 2**32

    def __init__(self, length: int, times: int | None):
        self.length: Count = math.inf if times is None else length * times
        self._repeated = length
        self._times = self._ENDLESS if times is None else times

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        repetitions, positions = np.divmod(positions, self._repeated)
        cuts = np.flatnonzero(np.diff(repetitions)) + 1
        starts = (0, *cuts.tolist())
        return [
            (pass_index * self._times + int(repetitions[start]), part)
            for start, part in zip(starts, np.split(positions, cuts), strict=True)
        ]


class Take:
    """The first `length` elements."""

    def __init__(self, length: int):
        self.length = length

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        return [(pass_index, positions)]


@dataclasses.dataclass(frozen=True)
class Order:
    """Steps applied one after another to elements numbered from 0.

    Attributes:
      base_length: how many elements there are before the first step.
      steps: the changes of order, the first change first.
    """

    base_length: Count
    steps: tuple[Step, ...] = ()

    @property
    def length(self) -> Count:
        """How many elements a pass has; `math.inf` for an endless order."""
        return self.steps[-1].length if self.steps else self.base_length

    def shuffle(self, seed: int) -> Order:
        """Returns this order, shuffled."""
        if not is_finite(self.length):
            raise ValueError("An endless dataset cannot be shuffled. Call `shuffle` before `repeat`.")
        return self._then(Shuffle(self.length, seed))

    def repeat(self, times: int | None) -> Order:
        """Returns this order, repeated; an endless order is returned as it is."""
        return self._then(Repeat(self.length, times)) if is_finite(self.length) else self

    def take(self, count: int) -> Order:
        """Returns the first `count` elements of this order, or all if it has fewer."""
        return self if count >= self.length else self._then(Take(count))

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        """Returns the numbers of the elements at `positions` of a pass, as runs that share a pass, in order."""
        runs = [(pass_index, positions)]
        for step in reversed(self.steps):
            runs = [found for run in runs for found in step.locate(*run)]
        return runs

    def _then(self, step: Step) -> Order:
        return dataclasses.replace(self, steps=(*self.steps, step))
