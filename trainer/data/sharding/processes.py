"""The processes that contribute rows to a batch, and their messages while reading.

Owns the set of processes and the matching of messages. The transport is an argument: this must not know of devices.
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
    """Processes that exchange texts without devices, from any thread."""

    def all_gather(self, text: str, what: str = "data") -> list[str]:
        """Returns the texts of all processes, after waiting for them."""

    def subgroup(self) -> Group:
        """Returns the same processes with a separate order of calls."""


class _Alone:
    """The group of a single process."""

    def all_gather(self, text: str, what: str = "data") -> list[str]:
        return [text]

    def subgroup(self) -> Group:
        return self


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that read data together.

    Attributes:
      index: index of this process.
      count: number of processes.
      shares: number of equal shares of a batch per process, a share for each replica.
      group: exchanges messages. All processes create channels from it in the same order.
      gather: returns the arrays of all processes, stacked. It uses the devices: all processes call it in the main
        thread.
    """

    index: int = 0
    count: int = 1
    shares: int = 1
    group: Group = dataclasses.field(default_factory=_Alone)
    gather: Callable[[np.ndarray], np.ndarray] = lambda array: array[None]

    def rows_of_each(self, rows: int) -> tuple[int, ...]:
        """Returns the number of rows of a batch for each process, if rows are split evenly over the replicas.

        >>> Processes(count=2, shares=2).rows_of_each(5)
        (4, 1)
        """
        most = -(-rows // (self.count * self.shares)) * self.shares
        return tuple(min(max(rows - index * most, 0), most) for index in range(self.count))


class Channel:
    """Messages of all processes, matched by their order.

    Args:
      group: the processes, each of which creates the channel.

    Example:
      >>> Channel(Processes().group).all(3)
      [3]
    """

    def __init__(self, group: Group):
        self._group = group.subgroup()

    def open(self) -> Channel:
        """Returns the next channel derived from this channel."""
        return Channel(self._group)

    def all(self, value: object) -> list[Any]:
        """Returns the values of all processes, by their index.

        Args:
          value: the value of this process; plain data, as in JSON.

        Raises:
          RuntimeError: if another process failed before it sent its value.
        """
        messages = [json.loads(text) for text in self._group.all_gather(json.dumps({"value": value}))]
        for process, message in enumerate(messages):
            if "error" in message:
                raise RuntimeError(f"The data of process {process} failed: "
                                   f"{printable(message['error'], newlines=True)}")
        return [message["value"] for message in messages]

    @contextlib.contextmanager
    def reports_errors(self) -> Iterator[None]:
        """Reports an error in the block to the other processes, which wait for the next message of this process."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error is more informative
                self._group.all_gather(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
