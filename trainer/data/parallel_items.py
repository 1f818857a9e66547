"""Batches of an indexed object that several threads or processes make ahead of use.

Owns the workers, the order of their results, their errors and their end. It does not inspect batches.
"""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import operator
import os
import signal
import traceback
import weakref
from collections.abc import Generator, Iterator
from multiprocessing import connection
from typing import Any

import jax

from trainer.core.ambient.processes import SentContext
from trainer.core.ambient.threads import in_caller_context
from trainer.core.types import Count
from trainer.data.prefetch import is_abandoned
from trainer.data.sources.sources import IndexedSource

_POLL_SECS = 0.1  # interval of checks for whether a batch is still needed
_END_SECS = 5.0  # time for a process to exit by itself


class ParallelSource(IndexedSource):
    """Batches of an indexed object that workers make, in the order of a single thread.

    Args:
      items, num_batches, shuffle, seed: as in `IndexedSource`.
      workers: number of threads or processes.
      in_processes: whether the workers are processes.
      max_ahead: maximum number of batches in progress or ready, at least 1; `math.inf` for all of a pass.
    """

    def __init__(self, items: Any, num_batches: Count, shuffle: bool, seed: int, workers: int, in_processes: bool,
                 max_ahead: Count):
        super().__init__(items, num_batches, shuffle, seed)
        self._count, self._in_processes, self._max_ahead = workers, in_processes, max_ahead
        self._processes: _Processes | None = None

    def close(self) -> None:
        """Ends the processes, if any; the next read starts new processes."""
        if self._processes is not None:
            self._processes.end()
            self._processes = None

    def _made(self, indices: Iterator[int]) -> Generator[Any, None, None]:
        self._begin_epoch()
        if not self._in_processes:
            return self._made_by_threads(indices)
        if self._processes is None:
            self._processes = _Processes(self._count, type(self._items).__name__)
        return self._processes.made(self._items, indices, self._max_ahead)

    def _made_by_threads(self, indices: Iterator[int]) -> Generator[Any, None, None]:
        waiting: collections.deque[tuple[int, concurrent.futures.Future[Any]]] = collections.deque()
        pool = concurrent.futures.ThreadPoolExecutor(self._count, thread_name_prefix="trainer-py-dataset")
        try:
            while True:
                while len(waiting) < self._max_ahead and (index := next(indices, None)) is not None:
                    waiting.append((index, pool.submit(in_caller_context(operator.getitem), self._items, index)))
                if not waiting:
                    return
                index, future = waiting.popleft()
                while not concurrent.futures.wait([future], _POLL_SECS).done:
                    if is_abandoned():
                        raise RuntimeError("These data are not needed any more.")
                try:
                    made = future.result()
                except Exception as error:
                    self._note(error, index)
                    raise
                yield made
                del made
        finally:
            pool.shutdown(cancel_futures=True)


class _Processes:
    """Processes that make batches in turn."""

    def __init__(self, count: int, name: str):
        self._name = name
        # A fork would copy the locks of JAX's threads in their current state.
        context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, connection.Connection]] = []
        self._waiting: collections.deque[tuple[int, int]] = collections.deque()  # workers, and the requested batches
        self._end = weakref.finalize(self, _end, self._workers)
        for number in range(count):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there,), name=f"trainer-py-dataset-{number}", daemon=True)
            worker.start()
            there.close()
            self._workers.append((worker, here))

    def end(self) -> None:
        """Ends the processes."""
        self._end()

    def made(self, items: Any, indices: Iterator[int], ahead: Count) -> Generator[Any, None, None]:
        """Yields the batches of given indices, in order, with the current state of the data set."""
        while self._waiting:  # pending results of an earlier pass
            self._receive()
            self._waiting.popleft()
        for number in range(len(self._workers)):
            self._send_items(number, items)
        turn = 0
        while True:
            while len(self._waiting) < ahead and (index := next(indices, None)) is not None:
                number = turn % len(self._workers)
                self._send(number, index)
                self._waiting.append((number, index))
                turn += 1
            if not self._waiting:
                return
            made, failure = self._receive()
            _, index = self._waiting.popleft()
            if failure is not None:
                raise RuntimeError(f"A worker process raised this while it made batch {index} of a {self._name}:\n"
                                   f"{failure}")
            yield made
            del made

    def _send_items(self, number: int, items: Any) -> None:
        # Sent again in each pass, because `on_epoch_begin` and `on_epoch_end` are called in this process only.
        try:
            self._workers[number][1].send((items, SentContext()))
        except OSError:
            raise self._ended(number, 0) from None
        except Exception as error:
            raise ValueError(
                f"`use_multiprocessing=True` needs a data set that can be sent to another process, but this "
                f"{self._name} cannot: {type(error).__name__}: {error}. Define its class in a module, keep no open "
                "files, locks or lambdas in it, or use threads: `use_multiprocessing=False`.") from error

    def _send(self, number: int, index: int) -> None:
        try:
            self._workers[number][1].send(index)
        except OSError:
            raise self._ended(number, index) from None

    def _receive(self) -> tuple[Any, str | None]:
        """Returns the batch of the oldest request, and the worker's error in place of it."""
        number, index = self._waiting[0]
        worker, channel = self._workers[number]
        while not connection.wait([channel, worker.sentinel], _POLL_SECS):
            if is_abandoned():
                raise RuntimeError("These data are not needed any more.")
        try:
            return channel.recv()
        except (EOFError, OSError):
            raise self._ended(number, index) from None

    def _ended(self, number: int, index: int) -> RuntimeError:
        worker = self._workers[number][0]
        worker.join(_END_SECS)
        return RuntimeError(
            f"Worker process {number} of a {self._name} ended with exit code {worker.exitcode} before it made batch "
            f"{index}; what it printed says why. A script that uses `use_multiprocessing=True` must begin its training "
            "within `if __name__ == \"__main__\":`, as each worker imports it.")


def _end(workers: list[tuple[Any, connection.Connection]]) -> None:
    for _, channel in workers:
        channel.close()  # ends the worker
    for worker, _ in workers:
        worker.join(_END_SECS)
        if worker.is_alive():
            worker.kill()
            worker.join()
    workers.clear()


def _serve(channel: connection.Connection) -> None:
    """Makes batches for another process, until it exits or closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process handles Ctrl-C
    os.environ["JAX_PLATFORMS"] = "cpu"  # for child processes
    jax.config.update("jax_platforms", "cpu")  # accelerators belong to the trainer's process
    items: Any = None
    context = SentContext()
    while True:
        try:
            message = channel.recv()
            failure = None
        except (EOFError, OSError):
            return
        except Exception:  # for example, a class that cannot be imported here
            message, failure = (None, context), traceback.format_exc()
        if not isinstance(message, int):
            (items, context), broken = message, failure
            continue
        made = None
        if broken is None:
            try:
                with context.entered():
                    made, failure = items[message], None
            except Exception:
                failure = traceback.format_exc()
        try:
            channel.send((made, broken or failure))
        except OSError:
            return
        except Exception:
            channel.send((None, traceback.format_exc()))
