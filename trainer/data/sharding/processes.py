"""The processes whose rows make up a batch together, and their messages while they read.

Owns who they are and which messages belong together. How a message travels is an argument: this must not know of
devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from trainer.core.received_text import printable


class Group(Protocol):
    """Processes that exchange texts without devices, so that any thread may do it."""

    def all_gather(self, text: str, what: str = "data") -> list[str]:
        """Returns the texts of all processes, waiting for them."""

    def subgroup(self) -> Group:
        """Returns the same processes with an order of calls of its own."""


class _Alone:
    """The group of one process."""

    def all_gather(self, text: str, what: str = "data") -> list[str]:
        return [text]

    def subgroup(self) -> Group:
        return self


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that read data for one another.

    Attributes:
      index: which of them this process is.
      count: how many there are.
      shares: of how many equal parts of a batch each has the rows: one for each of its replicas.
      group: exchanges their messages. Channels are made from it in the same order in all processes.
      gather: returns the arrays of all processes, stacked. Uses the devices: for the main thread of all of them.
    """

    index: int = 0
    count: int = 1
    shares: int = 1
    group: Group = dataclasses.field(default_factory=_Alone)
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

    Args:
      group: the processes, each of which makes the channel.

    Example:
      >>> Channel(Processes().group).all(3)
      [3]
    """

    def __init__(self, group: Group):
        self._group = group.subgroup()

    def open(self) -> Channel:
        """Returns another channel, the next one of this one."""
        return Channel(self._group)

    def all(self, value: object) -> list[Any]:
        """Returns the values of all processes, by their index.

        Args:
          value: that of this process; plain data, as JSON has them.

        Raises:
          RuntimeError: if another process failed before it gave its value.
        """
        messages = [json.loads(text) for text in self._group.all_gather(json.dumps({"value": value}))]
        for process, message in enumerate(messages):
            if "error" in message:
                raise RuntimeError(f"The data of process {process} failed: "
                                   f"{printable(message['error'], newlines=True)}")
        return [message["value"] for message in messages]

    @contextlib.contextmanager
    def reports_errors(self) -> Iterator[None]:
        """Lets the other processes, which wait for the next message of this process, know of an error in the block."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error is the one to show
                self._group.all_gather(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
