"""Reading groups, and placing them on devices, ahead of their use in a background thread.

Owns the thread, its order, its errors and its end. It must not know what a placement is.
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

# A thread that is inside the user's own code cannot be interrupted, only waited for.
_JOIN_TIMEOUT_SECS = 2.0


class Demand:
    """Whether a thread waits for a value that is being made, written by one thread and read by another.

    It is a context manager: a thread waits while its block runs.

    Args:
      patience_secs: how long they may wait before it is urgent.
    """

    def __init__(self, patience_secs: float = 0.3):
        self._patience_secs = patience_secs
        self._waits_since: float | None = None

    def __enter__(self) -> None:
        self._waits_since = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self._waits_since = None

    def is_there(self) -> bool:
        """Returns whether a thread waits."""
        return self._waits_since is not None

    def is_urgent(self) -> bool:
        """Returns whether a thread has waited for longer than its patience lasts."""
        since = self._waits_since
        return since is not None and time.monotonic() - since > self._patience_secs


def prefetch(
    groups: Iterator[S], place: Callable[[S], T], depth: int = 2, demand: Demand | None = None
) -> Prefetcher[T]:
    """Returns an iterator over placed groups that a background thread keeps ready.

    Args:
      groups: an iterator of groups, or of whatever `place` takes. It is the prefetcher's from now on: it runs in the
        thread, in the caller's context (see `in_caller_context`), and is closed with it.
      place: turns a group into what the consumer wants, such as arrays on devices; runs in the thread, likewise. Where
        the consumer waits for the group, it runs in the consumer's thread, so that the next groups come sooner.
      depth: how many placed groups are ready at most, in addition to the group in use.
      demand: is notified when the consumer waits.

    Raises:
      ValueError: `depth` is less than 1.
      TypeError: `depth` is no whole number.

    Example:
      >>> with prefetch(iter([1, 2, 3]), lambda group: group * 10) as ready:
      ...     list(ready)
      [10, 20, 30]
    """
    return Prefetcher(groups, place, depth, demand)


class Prefetcher(Generic[T]):
    """The iterator that `prefetch` returns; also a context manager that closes it.

    What the thread raises is raised in the consumer in its place, after the groups before it.
    """

    def __init__(
        self, groups: Iterator[S], place: Callable[[S], T], depth: int = 2, demand: Demand | None = None
    ):
        check_count("depth", depth)
        self._channel = _Channel(depth)
        self._place = place
        self._demand = demand or Demand()
        # The thread holds the channel and not the prefetcher, so that one that is dropped without `close` ends it too.
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
        """Ends the thread and drops what is ready; waits for it at most two seconds. May be called again.

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
    """Returns whether the caller reads for a prefetcher that was closed; for what waits in a pipeline."""
    reader = state.current().reader
    return reader is not None and reader.is_stopped


class _Channel:
    """What consumer and thread share.

    Free places go one way, and triples (value, whether it is placed, error) the other.
    """

    def __init__(self, depth: int):
        self.free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[tuple[Any, bool, BaseException | None]] = queue.SimpleQueue()
        self.is_stopped = False
        for _ in range(depth):
            self.free.put(None)

    def stop(self) -> None:
        self.is_stopped = True
        # Wakes a thread that waits for a free place.
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
            # Held on to while waiting for a place, it would be one group of memory more.
            del group
    except BaseException as error:
        # StopIteration is the end; everything else is the consumer's to see.
        channel.ready.put((None, True, error))
