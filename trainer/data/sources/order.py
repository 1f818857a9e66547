"""The order of elements as arithmetic on their indices: shuffle, repeat, take.

Owns the mapping from a position in a pass to the index of an element. It must not access data, so that any position of
any pass is found without reading earlier elements.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import threading
from typing import Protocol

import numpy as np

Count = int | float
"""A number of elements; `math.inf` if there is no end to them."""

_MANY = 2**20  # number of rows whose permutation is worth a thread

Run = tuple[int, np.ndarray]
"""A pass number, and positions within that pass."""


def generator_of_pass(seed: int, pass_index: int) -> np.random.Generator:
    """Returns the generator that shuffles a pass: a resumed run draws the order again, without the passes before."""
    return np.random.default_rng([seed, pass_index])


class Step(Protocol):
    """A change of the order."""

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        """Returns the origins of the elements at `positions`, before this step reorders them."""

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        """Starts slow computations for `locate` from a position on, and returns the origin of that position.

        An unknown position is 0.
        """


class Shuffle:
    """A new permutation in each pass, which depends on (seed, pass) only.

    A permutation of many rows takes seconds: 15 for 1e8. After `draw_ahead`, a thread draws it while the previous pass
    is read.
    """

    def __init__(self, length: int, seed: int):
        self._length = length
        self._seed = seed
        self._last: tuple[int, np.ndarray] | None = None
        self._ahead: dict[int, concurrent.futures.Future[np.ndarray]] = {}  # by pass: the current and the next

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        last = self._last
        if last is None or last[0] != pass_index:
            ahead = self._ahead.pop(pass_index, None)
            last = self._last = pass_index, self._permutation(pass_index) if ahead is None else ahead.result()
        return [(pass_index, last[1][positions].astype(np.int64))]

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        is_there = pass_index in self._ahead or (self._last is not None and self._last[0] == pass_index)
        if self._length >= _MANY and not is_there:
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
        # The result of `generator_of_pass(...).permutation(length)`, in half the memory if int32 suffices.
        numbers = np.arange(self._length, dtype=np.int32 if self._length <= np.iinfo(np.int32).max else np.int64)
        generator_of_pass(self._seed, pass_index).shuffle(numbers)
        return numbers


class Repeat:
    """Repeated passes; `times` is None for endless repetition. Each repetition is another pass of the elements."""

    # Number of repetitions reserved for an endless pass, which separates them from the repetitions of the next pass.
    _ENDLESS = 2**32

    def __init__(self, length: int, times: int | None):
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

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        repetition, position = divmod(position, self._repeated)
        return pass_index * self._times + repetition, position


@dataclasses.dataclass(frozen=True)
class Order:
    """Steps applied in turn to elements with indices from 0.

    Attributes:
      length: number of elements per pass; `math.inf` for an endless order.
      steps: the changes of the order, the first change first.
    """

    length: Count
    steps: tuple[Step, ...] = ()

    def shuffle(self, seed: int) -> Order:
        """Returns this order, shuffled."""
        if self.length == math.inf:
            raise ValueError("An endless dataset cannot be shuffled. Call `shuffle` before `repeat`.")
        return Order(self.length, (*self.steps, Shuffle(int(self.length), seed)))

    def repeat(self, times: int | None) -> Order:
        """Returns this order, repeated; an endless order is returned unchanged."""
        if self.length == math.inf:
            return self
        length = math.inf if times is None else self.length * times
        return Order(length, (*self.steps, Repeat(int(self.length), times)))

    def take(self, count: int) -> Order:
        """Returns the first `count` elements of this order, or all elements if it has fewer."""
        return Order(min(count, self.length), self.steps)

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Run]:
        """Returns the indices of the elements at `positions` of a pass, as runs that share a pass, in order."""
        runs = [(pass_index, positions)]
        for step in reversed(self.steps):
            runs = [found for run in runs for found in step.locate(*run)]
        return runs

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        """Starts slow computations for `locate` from a position of a pass on; see `Step.draw_ahead`."""
        for step in reversed(self.steps):
            pass_index, position = step.draw_ahead(pass_index, position)
        return pass_index, position
