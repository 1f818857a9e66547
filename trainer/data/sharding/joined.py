"""Batches joined from the batches of several processes.

Owns the synchronization of processes with different data: their rows in each batch, and the common end.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from trainer.core import plain
from trainer.data.sharding.processes import Channel, Processes
from trainer.data.sources.arrays import Batch, DataError, as_batch
from trainer.data.sources.groups import BatchConverter, LocalRows
from trainer.data.sources.sources import Source


class JoinedSource:
    """Batches that concatenate the rows of all processes' own batches, in the order of the processes.

    All processes must create it, read it and ask for its state in the same order.

    Args:
      source: this process's batches.
      processes: the processes whose batches are joined.

    Raises:
      ValueError: if the data of some processes, but not of all, are endless or can be read only once.
    """

    rows = None
    pipeline: list[str] = []  # descriptions that differ between processes cannot be compared with another run

    def __init__(self, source: Source, processes: Processes):
        self._source = source
        self._processes = processes
        self._channel = Channel(processes.group)
        self._states = self._channel.open()
        self._form: Batch | None = None  # a batch without rows
        kinds = self._channel.all([source.num_batches, source.is_one_shot])
        lengths = [length for length, _ in kinds]
        if len({(length == math.inf, is_one_shot) for length, is_one_shot in kinds}) > 1:
            raise ValueError("The data of all processes must be of one kind. Received, by process, batches and whether "
                             f"they can be read only once: {kinds}.")
        self.num_batches = None if None in lengths else max(lengths)
        self.num_shapes = source.num_shapes
        self.is_one_shot = source.is_one_shot
        self.seeks = source.seeks

    @property
    def is_exact(self) -> bool:
        return self._source.is_exact

    def read(self, pass_index: int, start: int = 0) -> Generator[LocalRows, None, None]:
        return self._joined(self._source.read(pass_index, start), self._channel.open())

    def state(self) -> dict[str, Any] | None:
        """Returns the states of all processes' iterators; None if any has no state."""
        own = self._source.state()
        states = [state and _received(state) for state in self._states.all(own and _sent(own))]
        if own is None or None in states or any(state["pass_index"] != own["pass_index"] for state in states):
            return None  # the last: while others still read a pass, it is over here
        return {"pass_index": own["pass_index"], "processes": states}

    def read_from(self, state: dict[str, Any]) -> Generator[LocalRows, None, None]:
        states = state.get("processes", ())
        if len(states) != self._processes.count:
            raise ValueError(f"The data were read by {len(states) or 'other'} processes when they were saved, with a "
                             f"position for each. Received: {self._processes.count} processes.")
        return self._joined(self._source.read_from(states[self._processes.index]), self._channel.open())

    def end_epochs(self, count: int) -> None:
        self._source.end_epochs(count)

    def close(self) -> None:
        self._source.close()

    def _joined(self, batches: Generator[Any, None, None], channel: Channel) -> Generator[LocalRows, None, None]:
        own_batches = map(BatchConverter(), batches)
        try:
            while True:
                with channel.reports_errors():
                    own = next(own_batches, None)
                    if own is None:
                        own = self._without_rows()
                rows = None if own is None else jax.tree.leaves(own)[0].shape[0]
                counts = channel.all(rows)
                if not any(counts):
                    return
                if None in counts:
                    raise DataError(f"Process {counts.index(None)} has no batch at all, but others have. With "
                                    "AutoShardPolicy.OFF each process must yield at least one.")
                if rows:
                    self._form = jax.tree.map(lambda leaf: np.empty_like(leaf[:0]), own)
                whole = functools.cache(functools.partial(self._gathered, own, tuple(counts)))
                yield LocalRows(own, tuple(counts), whole)
        finally:
            batches.close()

    def _without_rows(self) -> Batch | None:
        if self._form is None and not self.is_one_shot:  # resumed beyond this process's last batch
            batches = self._source.read(0)
            first = next(map(as_batch, batches), None)
            batches.close()
            self._form = None if first is None else jax.tree.map(lambda leaf: np.empty_like(leaf[:0]), first)
        return self._form

    def _gathered(self, own: Batch, counts: tuple[int, ...]) -> Batch:
        def all_rows(leaf: np.ndarray) -> np.ndarray:
            padded = np.zeros((max(counts), *leaf.shape[1:]), leaf.dtype)
            padded[:len(leaf)] = leaf
            return np.concatenate([rows[:count] for rows, count in
                                   zip(self._processes.gather(padded), counts, strict=True)])

        return jax.tree.map(all_rows, own)


def _sent(state: dict[str, Any]) -> list[Any]:
    """Returns a state, which is plain data and arrays, as JSON."""
    jsonable, arrays = plain.encode(state)
    return [jsonable, {name: [array.dtype.name, array.shape, base64.b64encode(array.tobytes()).decode()]
                       for name, array in arrays.items()}]


def _received(sent: list[Any]) -> dict[str, Any]:
    jsonable, arrays = sent
    return plain.decode(jsonable, {
        name: np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
        for name, (dtype, shape, data) in arrays.items()})
