"""The order of elements as arithmetic on their numbers: shuffle, repeat, take.

Owns the mapping from a position in a pass to the number of an element. It must not touch data, so that any position of
any pass is found without reading what comes before it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import threading
from typing import Protocol, TypeGuard

import numpy as np

Count = int | float
"""A number of elements; `math.inf` if there is no end to them."""

_MANY = 2**20  # rows, whose permutation takes longer than a thread is worth

Run = tuple[int, np.ndarray]
"""A pass number, and positions within that pass."""


def is_finite(count: Count | None) -> TypeGuard[int]:
    """Returns whether `count` is a number: neither endless nor, as None says, unknown."""
    return count is not None and count != math.inf


class Step(Protocol):
    """One change of order."""

    @property
    def length(self) -> Count:
        """How many elements it yields in a pass."""

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        """Returns where, in the elements that this step reorders, those at `positions` come from."""

    def prepare(self, pass_index: int, position: int) -> tuple[int, int]:
        """Begins what `locate` will need from a position on, where it takes long, and returns where that comes from.

        A position that is not known yet is 0.
        """


class Shuffle:
    """Another permutation in each pass, a function of (seed, pass) alone.

    One of many rows takes seconds: 15 for 1e8. A thread draws it while the pass before is read, if `prepare` is called.
    """

    def __init__(self, length: int, seed: int):
        self.length = length
        self._seed = seed
        self._last: tuple[int, np.ndarray] | None = None
        self._ahead: dict[int, concurrent.futures.Future[np.ndarray]] = {}  # by pass: the one that begins, and the next

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        last = self._last
        if last is None or last[0] != pass_index:
            ahead = self._ahead.pop(pass_index, None)
            last = self._last = pass_index, self._permutation(pass_index) if ahead is None else ahead.result()
        return [(pass_index, last[1][positions].astype(np.int64))]

    def prepare(self, pass_index: int, position: int) -> tuple[int, int]:
        is_there = pass_index in self._ahead or (self._last is not None and self._last[0] == pass_index)
        if self.length >= _MANY and not is_there:
            for other in list(self._ahead)[:-1]:
                del self._ahead[other]
            future = self._ahead[pass_index] = concurrent.futures.Future[np.ndarray]()
            threading.Thread(
                target=self._draw, args=(pass_index, future), name="trainer-shuffle", daemon=True).start()
        return pass_index, 0

    def _draw(self, pass_index: int, future: concurrent.futures.Future[np.ndarray]) -> None:
        try:
            future.set_result(self._permutation(pass_index))
        except Exception as error:
            future.set_exception(error)

    def _permutation(self, pass_index: int) -> np.ndarray:
        # What `permutation(length)` returns, in half the memory where the numbers fit.
        numbers = np.arange(self.length, dtype=np.int32 if self.length <= np.iinfo(np.int32).max else np.int64)
        np.random.default_rng([self._seed, pass_index]).shuffle(numbers)
        return numbers


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

    def prepare(self, pass_index: int, position: int) -> tuple[int, int]:
        repetition, position = divmod(position, self._repeated)
        return pass_index * self._times + repetition, position


class Take:
    """The first `length` elements."""

    def __init__(self, length: int):
        self.length = length

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        return [(pass_index, positions)]

    def prepare(self, pass_index: int, position: int) -> tuple[int, int]:
        return pass_index, position


@dataclasses.dataclass(frozen=True)
class Order:
    """Steps applied one after another to elements numbered from 0.

    Attributes:
      base_length: how many elements there are before the first step.
      steps: the changes of order, the first change first.
    """

    base_length: Count
    steps: tuple[Step, ...] = ()

    @functools.cached_property
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

    def prepare(self, pass_index: int, position: int) -> tuple[int, int]:
        """Begins what `locate` will need from a position of a pass on, where it takes long; see `Step.prepare`."""
        for step in reversed(self.steps):
            pass_index, position = step.prepare(pass_index, position)
        return pass_index, position

    def _then(self, step: Step) -> Order:
        return dataclasses.replace(self, steps=(*self.steps, step))
