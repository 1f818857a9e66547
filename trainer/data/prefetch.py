"""Reading groups and placing them on devices in a background thread, ahead of use.

Owns the thread, its order, its errors and its end. It must not know how groups are placed.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from trainer.core.ambient import state
from trainer.core.ambient.threads import in_caller_context
from trainer.core.arguments import check_count

S = TypeVar("S")
T = TypeVar("T")

# A thread inside the user's own code cannot be interrupted; the consumer can only wait for it.
_JOIN_TIMEOUT_SECS = 2.0


class Demand:
    """Whether a thread waits for a pending value. A single thread writes it and another thread reads it.

    It is a context manager: a thread waits while its block runs.

    Args:
      patience_secs: waiting time in seconds after which the demand is urgent.
    """

    def __init__(self, patience_secs: float = 0.3):
        self._patience_secs = patience_secs
        self._waits_since: float | None = None

    def __enter__(self) -> None:
        self._waits_since = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self._waits_since = None

    def is_there(self) -> bool:
        """Returns whether a thread is waiting."""
        return self._waits_since is not None

    def is_urgent(self) -> bool:
        """Returns whether a thread has waited longer than `patience_secs`."""
        since = self._waits_since
        return since is not None and time.monotonic() - since > self._patience_secs


def prefetch(
    groups: Iterator[S], place: Callable[[S], T], depth: int = 2, demand: Demand | None = None
) -> Prefetcher[T]:
    """Returns an iterator over placed groups that a background thread keeps ready.

    Args:
      groups: an iterator of groups, or of other arguments of `place`. The prefetcher takes ownership: the iterator runs
        in the thread, in the caller's context (see `in_caller_context`), and is closed with the prefetcher.
      place: converts a group for the consumer, for example to arrays on devices. It runs in the thread too, in the same
        context, but in the consumer's thread for a group that the consumer waits for, so that later groups come sooner.
      depth: maximum number of ready groups, in addition to the group in use.
      demand: is notified when the consumer waits.

    Raises:
      ValueError: if `depth` is less than 1.
      TypeError: if `depth` is not an integer.

    Example:
      >>> with prefetch(iter([1, 2, 3]), lambda group: group * 10) as ready:
      ...     list(ready)
      [10, 20, 30]
    """
    return Prefetcher(groups, place, depth, demand)


class Prefetcher(Generic[T]):
    """The iterator of `prefetch`; also a context manager that closes it.

    An exception in the thread is raised in the consumer, after the groups before it.
    """

    def __init__(
        self, groups: Iterator[S], place: Callable[[S], T], depth: int = 2, demand: Demand | None = None
    ):
        check_count("depth", depth)
        self._channel = _Channel(depth)
        self._place = place
        self._demand = demand or Demand()
        # The thread refers to the channel and not to the prefetcher, so that a dropped prefetcher ends it too.
        self._stop = weakref.finalize(self, self._channel.stop)
        self._thread = threading.Thread(
            target=in_caller_context(_run),
            args=(groups, place, self._channel, self._demand),
            name="trainer-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if not self._stop.alive:
            raise StopIteration
        with self._demand:
            value, is_placed, error = self._channel.ready.get()
        try:
            if error is not None:
                raise error
            self._channel.free.put(None)
            return value if is_placed else self._place(value)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the thread and drops ready groups; waits for the thread at most two seconds. May be called again.

        The iterator of groups is closed in the thread, so that the `finally` blocks of a pipeline run.
        """
        self._stop()
        self._thread.join(_JOIN_TIMEOUT_SECS)
        self._channel.ready = queue.SimpleQueue()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_abandoned() -> bool:
    """Returns whether the caller reads for a closed prefetcher; for waiting pipelines."""
    reader = state.current().reader
    return reader is not None and reader.is_stopped


class _Channel:
    """Shared state of consumer and thread: free slots, and results (value, whether it is placed, error)."""

    def __init__(self, depth: int):
        self.free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[tuple[Any, bool, BaseException | None]] = queue.SimpleQueue()
        self.is_stopped = False
        for _ in range(depth):
            self.free.put(None)

    def stop(self) -> None:
        self.is_stopped = True
        # Wakes a thread that waits for a free slot.
        self.free.put(None)


def _run(groups: Iterator[Any], place: Callable[[Any], Any], channel: _Channel, demand: Demand) -> None:
    with state.replaced(reader=channel):
        try:
            _place_all(groups, place, channel, demand)
        finally:
            if hasattr(groups, "close"):
                groups.close()


def _place_all(groups: Iterator[Any], place: Callable[[Any], Any], channel: _Channel, demand: Demand) -> None:
    try:
        while True:
            channel.free.get()
            if channel.is_stopped:
                return
            group = next(groups)
            if channel.is_stopped:
                return
            is_awaited = demand.is_there()
            channel.ready.put((group if is_awaited else place(group), not is_awaited, None))
            # Otherwise it would hold another group's memory while waiting for a slot.
            del group
    except BaseException as error:
        # StopIteration is the end; the consumer raises all other exceptions.
        channel.ready.put((None, True, error))
