"""The processes whose rows make up a batch together, and what they tell each other while they read.

Owns who they are and which messages belong together. How a message travels is an argument: this must not know of
devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_numbers = itertools.count()  # of the channels, which all processes make in the same order


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that read data for one another.

    Attributes:
      index: which of them this one is.
      count: how many there are.
      shares: of how many equal parts of a batch each has the rows: one for each of its replicas.
      exchange: given a key, a text and the key before, returns the texts of all processes for that key, waiting for
        them. Uses no device, so that any thread may call it.
      gather: returns the arrays of all processes, stacked. Uses the devices: for the main thread of all of them.
    """

    index: int = 0
    count: int = 1
    shares: int = 1
    exchange: Callable[[str, str, str | None], list[str]] = lambda key, text, before: [text]
    gather: Callable[[np.ndarray], np.ndarray] = lambda array: array[None]

    def rows_of_each(self, rows: int) -> tuple[int, ...]:
        """Returns how many of a batch's rows each process has, if they are split evenly over the replicas.

        >>> Processes(count=2, shares=2).rows_of_each(5)
        (4, 1)
        """
        most = -(-rows // (self.count * self.shares)) * self.shares
        return tuple(min(max(rows - index * most, 0), most) for index in range(self.count))


class Channel:
    """Messages of all processes, of which the first of each belong together, the second, and so on.

    Example:
      >>> Channel(Processes()).all(3)
      [3]
    """

    def __init__(self, processes: Processes, name: str | None = None):
        self._processes = processes
        self._name = str(next(_numbers)) if name is None else name
        self._opened = itertools.count()
        self._messages = itertools.count()
        self._before: str | None = None

    def open(self) -> Channel:
        """Returns another channel, the next one of this one."""
        return Channel(self._processes, f"{self._name}/{next(self._opened)}")

    def all(self, value: Any) -> list[Any]:
        """Returns what each process has to say, by its index.

        Args:
          value: what this one says; plain data, as JSON has them.

        Raises:
          RuntimeError: if another process failed in place of saying something.
        """
        if self._processes.count == 1:
            return [value]
        said = [json.loads(text) for text in self._exchange({"value": value})]
        for process, message in enumerate(said):
            if "error" in message:
                raise RuntimeError(f"The data of process {process} failed: {message['error']}")
        return [message["value"] for message in said]

    @contextlib.contextmanager
    def reports_errors(self) -> Iterator[None]:
        """Lets the other processes, which wait for this one's next message, know of an error in the block."""
        try:
            yield
        except Exception as error:
            if self._processes.count > 1:
                with contextlib.suppress(Exception):  # the first error is the one to show
                    self._exchange({"error": f"{type(error).__name__}: {error}"})
            raise

    def _exchange(self, message: dict[str, Any]) -> list[str]:
        key = f"{self._name}/message{next(self._messages)}"
        texts = self._processes.exchange(key, json.dumps(message), self._before)
        self._before = key
        return texts
