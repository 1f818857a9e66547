"""ClusterCoordinator: a queue of functions, and a thread for each worker that runs them.

Owns TensorFlow's guarantees: a function runs at least once, even if workers are lost, and an error is raised once, when
nothing is running any more. It must not know the contents of a function.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from trainer.core import errors
from trainer.core.ambient import state
from trainer.core.ambient.processes import SentContext
from trainer.distribute.parameter_server.per_worker import PerWorkerDataset
from trainer.distribute.parameter_server.processes.engine import Handle, RemoteCallError, UnreadableResultError
from trainer.distribute.parameter_server.processes.failures import ProcessLostError, WorkerLostError
from trainer.distribute.parameter_server.processes.wire import Packed, Resource, pack
from trainer.distribute.parameter_server.shared import SharedFunction
from trainer.distribute.replica.distributed_dataset import InputContext

if TYPE_CHECKING:
    from trainer.distribute.parameter_server.strategy import ParameterServerStrategy

RETRY_SECS = 10.0  # maximum time between two attempts to replace a worker
MAX_QUEUED = 256  # functions in the queue; `schedule` blocks beyond
MAX_HELD = 256  # resources of a worker, before it forgets functions; closures over different values count separately
MAX_LOSSES = 3  # workers that a function may lose


class RemoteValue:
    """Future result of a scheduled function.

    The value is copied to the chief when the function ends, so that it outlives the worker.
    """

    def __init__(self, name: str):
        self._name = name
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A `RemoteValue` has no value yet when it is sent. Use what `fetch` returns.")

    def __repr__(self) -> str:
        return f"RemoteValue({self._name}, {'done' if self._future.done() else 'pending'})"

    def fetch(self) -> Any:
        """Waits for the function and returns its result.

        Raises:
          concurrent.futures.CancelledError: if the error of another function cancelled it. Schedule it again.
          Exception: the exception of the function, of the same class if built in, otherwise a RuntimeError. A
            StopIteration is a RuntimeError, too: it would end a loop or a generator around this call silently.
          TypeError: if the result cannot be unpickled here; it names the function and its worker.
        """
        try:
            return self._future.result()
        except concurrent.futures.CancelledError:
            raise concurrent.futures.CancelledError(
                f"{self._name} was cancelled, as another function has raised an error, or the strategy was closed. "
                "Schedule it again.") from None

    get = fetch


class _Closure:
    """A function that waits or runs."""

    def __init__(self, name: str, packed: Packed, needs: Mapping[str, Packed]):
        self.name = name
        self.packed, self.needs = packed, needs
        self.value = RemoteValue(name)
        self.losses = 0


class _WorkerSlot:
    """A worker, replaced when it is lost."""

    def __init__(self, index: int, handle: Handle):
        self.index, self.handle = index, handle
        self.has_started = False
        self.is_lost = False  # and could not be replaced
        self.sent: dict[str, None] = {}  # keys of resources, oldest first
        self.released: collections.deque[str] = collections.deque()  # keys that the worker may forget

    def oldest_function(self) -> str | None:
        """Removes the oldest function from the sent resources and returns its key; None if there is none."""
        key = next((key for key in self.sent if key.startswith(SharedFunction.PREFIX)), None)
        if key is not None:
            del self.sent[key]
        return key


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    Each strategy has a single coordinator, which every call returns.

    Args:
      strategy: the strategy.

    Raises:
      ValueError: if `strategy` is another strategy.

    Source: `tf.distribute.coordinator.ClusterCoordinator`.
    """

    strategy: ParameterServerStrategy

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        made = getattr(strategy, "_coordinator", None)
        if not isinstance(made, cls):
            raise ValueError("`strategy` must be a ParameterServerStrategy, whose workers run what is scheduled. "
                             f"Received: {errors.describe(strategy)}.")
        return made

    @classmethod
    def _of(cls, strategy: ParameterServerStrategy, workers: Sequence[Handle],
            replace: Callable[[int], Handle], timeout: float | None) -> ClusterCoordinator:
        coordinator = object.__new__(cls)
        coordinator.strategy = strategy
        coordinator._start(workers, replace, timeout)
        return coordinator

    def _start(self, workers: Sequence[Handle], replace: Callable[[int], Handle], timeout: float | None) -> None:
        self._replace, self._timeout = replace, timeout
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for `schedule` and `join`
        self._has_work = threading.Condition(lock)  # for workers: a function wakes a single worker, not all
        self._queue: collections.deque[_Closure] = collections.deque()
        self._packing = threading.RLock()  # guards `_resources`, and the sending of models in a function
        self._resources: dict[str, tuple[Packed, dict[str, Packed]]] = {}  # newest last
        self._running: set[int] = set()  # workers that run a function
        self._error: BaseException | None = None
        self._is_closed = False
        self._slots = [_WorkerSlot(index, handle) for index, handle in enumerate(workers)]
        for slot in self._slots:
            threading.Thread(target=self._serve, args=(slot,), name=f"trainer worker {slot.index}", daemon=True).start()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A ClusterCoordinator is of the chief, which alone schedules functions.")

    # --- public methods --------------------------------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedules a function on a worker. Returns at once, unless the queue is full.

        The function runs at least once: it runs again if its worker is lost. A function of the script is sent by value;
        a function of a module must be importable on the workers by the same path. It runs under the JAX options of the
        caller's JAX context managers, and in the strategy's scope if the caller is in it.

        Args:
          fn: the function.
          args: positional arguments. An iterator of a per-worker dataset becomes the worker's own.
          kwargs: keyword arguments.

        Raises:
          ValueError: if an argument is a `RemoteValue`: `fetch` it first.
          Exception: the exception of an earlier function. It is raised once.
        """
        if not callable(fn):
            raise errors.wrong_type("fn", fn, "a function")
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if any(isinstance(leaf, RemoteValue) for leaf in jax.tree.leaves((args, kwargs))):
            raise ValueError("A `RemoteValue` cannot be an argument of a scheduled function, which may run before the "
                             "value is there. Pass what `fetch` returns.")
        name = f"`{getattr(fn, '__name__', type(fn).__name__)}`"
        try:
            with self._packing:
                packed, resources = pack((SharedFunction.of(fn), args, kwargs, self._sent_context()))
                needs = self._packed_resources(resources)
        except Exception as error:
            raise TypeError(f"{name} or its arguments cannot be sent to a worker: {error} Pass arrays and plain "
                            "values, and open files, locks and the like inside of the function.") from error
        closure = _Closure(name, packed, needs)
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < MAX_QUEUED or self._error is not None or self._is_closed)
            self._raise_error()
            self.require_open()
            self._queue.append(closure)
            self._has_work.notify()
        return closure.value

    def join(self) -> None:
        """Waits until all scheduled functions have ended.

        Raises:
          Exception: the exception of a function. Functions that had not started are then cancelled, and nothing is
            running.
          ParameterServerLostError: if a parameter server is lost.
          WorkerLostError: if workers were lost and cannot be replaced.
        """
        with self._changed:
            self.wait_until_idle()
            self._raise_error()

    def done(self) -> bool:
        """Returns whether all scheduled functions have ended. Raises the same exceptions as `join`."""
        with self._changed:
            self._raise_error()
            return self._is_idle()

    def fetch(self, val: object) -> Any:
        """Returns a structure with the values of its `RemoteValue`s, after waiting for them."""
        return jax.tree.map(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any] | Any) -> PerWorkerDataset:
        """Returns a dataset that every worker reads separately.

        Args:
          dataset_fn: a function that returns an iterable, called at most once for each worker and iterator; or the
            iterable itself; or the result of `ParameterServerStrategy.distribute_datasets_from_function`.

        Returns:
          A dataset. Pass the result of `iter` on it to scheduled functions, which call `next` on it.
        """
        if isinstance(dataset_fn, PerWorkerDataset):
            return dataset_fn

        def make(context: InputContext) -> Any:
            return dataset_fn() if callable(dataset_fn) else dataset_fn

        return PerWorkerDataset(make, len(self._slots), self.release)

    # --- the queue -------------------------------------------------------------------------------------------------

    def wait_until_idle(self) -> None:
        """Waits until nothing is queued or running, without raising the exceptions of functions."""
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def require_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("The strategy is closed, and its workers and servers have ended. Use it inside of its "
                               "`with` block or before `close`, or make another strategy and models under it.")

    def cancel(self) -> None:
        """Cancels queued functions; running functions end."""
        with self._changed:
            for closure in self._queue:
                closure.value._future.cancel()
            self._queue.clear()
            self._changed.notify_all()

    def release(self, key: str) -> None:
        """Tells workers to forget a resource that the chief no longer holds; takes no lock, for finalizers."""
        self._resources.pop(key, None)
        for slot in self._slots:
            slot.released.append(key)

    def close(self) -> None:
        """Cancels queued functions, and ends the threads once their functions have ended or their workers are gone."""
        with self._changed:
            self._is_closed = True
            self.cancel()
            self._has_work.notify_all()

    def _is_idle(self) -> bool:
        return not self._queue and not self._running

    def _raise_error(self) -> None:
        """Raises the error of a function once all have ended; called with the lock."""
        if self._error is not None:
            self.wait_until_idle()
            error, self._error = self._error, None
            raise error

    def _failed(self, error: BaseException, closure: _Closure | None = None) -> None:
        """Stores an error, the first of several; called with the lock."""
        if closure is not None and not closure.value._future.done():
            closure.value._future.set_exception(error)
        if self._error is None:
            self._error = error
        self.cancel()

    def _serve(self, slot: _WorkerSlot) -> None:
        while True:
            with self._changed:
                self._has_work.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                closure = self._queue.popleft()
                self._running.add(slot.index)
                self._changed.notify_all()
            try:
                self._run(slot, closure)
            except Exception as error:  # an internal error, which must not leave anybody waiting
                with self._changed:
                    self._failed(error, closure)
            finally:
                with self._changed:
                    self._running.discard(slot.index)
                    self._changed.notify_all()

    def _run(self, slot: _WorkerSlot, closure: _Closure) -> None:
        try:
            if not slot.has_started:  # startup does not count toward a function's timeout
                slot.handle.call("ready")
                slot.has_started = True
            self._send_missing(slot, closure.needs)
            value = slot.handle.call_packed("run", closure.packed, timeout=self._timeout)
        except RemoteCallError as error:
            with self._changed:
                self._failed(error.failure.error(f"{closure.name} on {slot.handle.name}"), closure)
        except UnreadableResultError as error:
            unread = TypeError(f"{closure.name} on {slot.handle.name} has returned a value that the chief cannot read: "
                               f"{error}. Return arrays and plain values, or objects of modules that the chief can "
                               "import, too.")
            unread.__cause__ = error.__cause__
            with self._changed:
                self._failed(unread, closure)
        except (ProcessLostError, TimeoutError) as error:
            self._lost(slot, closure, error)
        else:
            closure.value._future.set_result(value)

    def _sent_context(self) -> SentContext:
        in_scope = state.current().strategy is self.strategy
        return SentContext(self.strategy if in_scope else None)

    def _packed_resources(self, resources: Mapping[str, Resource]) -> dict[str, Packed]:
        """Returns packed resources for workers, each after the resources that it names."""
        needs: dict[str, Packed] = {}
        for key, resource in resources.items():
            if key not in self._resources:
                packed, others = pack(resource.build)
                if key in others:
                    raise TypeError("A model that is sent must not be one of its own attributes, or have a bound "
                                    "method of its own as one.")
                below = self._packed_resources(others)
                self._resources[key] = packed, below
                while len(self._resources) > MAX_HELD:
                    oldest, *_ = list(self._resources)  # in one operation, because finalizers remove some
                    self._resources.pop(oldest, None)
            else:
                packed, below = self._resources[key]
            needs |= {**below, key: packed}
        return needs

    def _send_missing(self, slot: _WorkerSlot, needs: Mapping[str, Packed]) -> None:
        while slot.released:
            key = slot.released.popleft()
            if key in slot.sent:
                del slot.sent[key]
                slot.handle.call("forget", key, timeout=self._timeout)
        for key, packed in needs.items():
            if key not in slot.sent:
                slot.handle.call("hold", key, packed, timeout=self._timeout)
                slot.sent[key] = None
                if len(slot.sent) > MAX_HELD and (old := slot.oldest_function()) is not None:
                    slot.handle.call("forget", old, timeout=self._timeout)

    def _lost(self, slot: _WorkerSlot, closure: _Closure, error: Exception) -> None:
        """Queues a function again whose worker is lost, and replaces the worker."""
        slot.handle.kill()
        if self._is_closed:
            closure.value._future.cancel()
            return
        closure.losses += 1
        reason = str(error)
        if isinstance(error, TimeoutError):
            reason = f"{slot.handle.name} did not end {closure.name} within {self._timeout:g} s, and was killed."
        with self._changed:
            if closure.losses >= MAX_LOSSES:
                self._failed(WorkerLostError(
                    f"{closure.name} has ended {closure.losses} workers, one after the other. The last: {reason} It "
                    "may need more memory than there is, or crash in native code."), closure)
            elif self._error is not None:  # it would only be cancelled
                closure.value._future.cancel()
            else:
                try:
                    warnings.warn(f"{reason} {closure.name} is run again by another worker.", stacklevel=1)
                except UserWarning as warning:  # a filter turns warnings into errors
                    self._failed(warning, closure)
                else:
                    self._queue.appendleft(closure)
                    self._has_work.notify()
            self._running.discard(slot.index)
            self._changed.notify_all()
        self._replace_worker(slot)

    def _replace_worker(self, slot: _WorkerSlot) -> None:
        for attempt in itertools.count(1):
            if self._is_closed:
                return
            try:
                slot.handle, slot.sent = self._replace(slot.index), {}
                slot.handle.call("ready")
                slot.is_lost, slot.has_started = False, True
                return
            except Exception as error:  # for example, there is no memory for the process
                slot.is_lost = slot.is_lost or attempt == MAX_LOSSES
                with self._changed:
                    if all(slot.is_lost for slot in self._slots):
                        self._failed(WorkerLostError(f"No worker is left. worker {slot.index} cannot be started again: "
                                                     f"{error}"))
                    # Its machine may come back; the other workers continue.
                    self._changed.wait_for(lambda: self._is_closed, min(0.1 * 2 ** attempt, RETRY_SECS))
