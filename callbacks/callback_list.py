"""The callbacks of a run, called as a single callback, and the history, which every `fit` has.

Owns the order of calls and the logs of the epochs. It knows which hooks are overridden.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from trainer.callbacks.base.callback import Callback, LogNames, Logs, adds_logs
from trainer.callbacks.base.keras_callback import KerasCallback, as_callback
from trainer.callbacks.base.lazy_logs import begin_fetch
from trainer.callbacks.base.run_protocol import Run, SavePoint
from trainer.callbacks.lambda_callback import LambdaCallback
from trainer.callbacks.learning_rate_scheduler import LearningRateScheduler
from trainer.callbacks.progress.progress_bar import ProgbarLogger
from trainer.callbacks.record import tables
from trainer.callbacks.record.curves import curves
from trainer.callbacks.terminate_on_nan import TerminateOnNaN, warn_of_non_finite_logs
from trainer.core.arguments import as_count, require_bool, require_text
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import near_hint, see
from trainer.core.types import Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THREADS: dict[int, list[threading.Thread]] = {}  # that hold a callback, by its id

_BATCH_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
_ARGUMENTS = {
    "on_epoch_begin": ("epoch", "logs"), "on_epoch_end": ("epoch", "logs"),
    **{f"on_{phase}_{end}": ("logs",) for phase in _BATCH_HOOKS for end in ("begin", "end")},
    **{hook: ("batch", "logs") for hooks in _BATCH_HOOKS.values() for hook in hooks}}
_OF_FUNCTIONS = (KerasCallback, LambdaCallback, LearningRateScheduler)


class CallbackList(Callback):
    """A list of callbacks with the interface of a callback: each hook calls that hook of all callbacks, in order.

    As a context manager, it releases the callbacks at exit.

    All callbacks flush (see `Callback.flush`) before the end of an epoch and before any callback saves.

    Args:
      callbacks: a callback, a list or tuple of callbacks, or None. Instances of Keras's `Callback` are accepted.
      add_history: whether to append a `History` if there is none.
      add_progbar: whether to append a `ProgbarLogger` if there is none.
      model: model that is passed to each callback.
      **params: values of the callbacks' `params`: `verbose`, `epochs`, `steps`.

    Attributes:
      callbacks: the list, including appended callbacks.

    Raises:
      TypeError: if an element of `callbacks` is not a `Callback`, or a "chief" callback has a `next_sync_step`.
      ValueError: if the `runs_on` of a callback is neither "all" nor "chief".

    Example:

    >>> from trainer.callbacks import CallbackList, LambdaCallback
    >>> callback_list = CallbackList([LambdaCallback(on_train_batch_end=lambda batch, logs: print(batch, logs))])
    >>> callback_list.wants_batch_hooks("train"), callback_list.wants_batch_hooks("test")
    (True, False)
    >>> callback_list.on_train_batch_end(7)
    7 {}
    """

    def __init__(
        self,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: object = None,
        **params: Any,
    ):
        require_bool(add_history=add_history, add_progbar=add_progbar)
        several = isinstance(callbacks, (list, tuple))
        given = callbacks if several else [] if callbacks is None else [callbacks]
        self.callbacks: list[Callback] = list(map(as_callback, given))
        for index, callback in enumerate(self.callbacks):
            if not isinstance(callback, Callback):
                hint = _hint(callback)
                raise TypeError(
                    f"`callbacks` must be instances of `Callback`. Received: a value of type {type(callback).__name__} "
                    f"at index {index}.{hint}"
                )
        for wanted, kind in ((add_history, History), (add_progbar, ProgbarLogger)):
            if wanted and not any(isinstance(callback, kind) for callback in self.callbacks):
                self.callbacks.append(kind())
        for callback in self.callbacks:
            _check_place(callback)
            _check_hooks(callback)
            if type(callback) is History:
                callback.reads_late = len(self.callbacks) == 1
        self._is_chief = jax.process_index() == 0
        self._held: list[tuple[object, threading.Thread]] = []
        self._save_at: int | None = None  # the next batch of this epoch after which a callback saves
        if model is not None:
            self.set_model(model)
        if params:
            self.set_params(params)

    @property
    def _called(self) -> list[Callback]:
        # The skipped "chief" callbacks still count when the processes decide how many batches to fuse.
        return self.callbacks if self._is_chief else [
            callback for callback in self.callbacks if callback.runs_on == "all"]

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        for callback in self.callbacks:
            callback.set_params(params)

    def set_model(self, model: Any) -> None:
        self._model = model
        for callback in self.callbacks:
            callback.set_model(model)

    def hold(self) -> None:
        """Keeps other threads from using the callbacks, until `release`.

        Raises:
          RuntimeError: if another thread holds any of the callbacks.
        """
        thread = threading.current_thread()
        for callback in self.callbacks:
            user = callback.callback if isinstance(callback, KerasCallback) else callback
            threads = _THREADS.setdefault(id(user), [])
            threads.append(thread)  # before the look at others: of two that begin together, one sees the other
            self._held.append((user, thread))
            for other in threads:
                if other is not thread:
                    self.let_go()
                    raise RuntimeError(
                        f"The callback `{type(user).__name__}` is used by two threads: a call in {other.name!r} has "
                        "it, and has not ended. Its `model`, and what it counts, would be mixed. Give each call a "
                        f"callback of its own. {see('two-threads')}")

    def let_go(self) -> None:
        """Lets other threads use the callbacks."""
        while self._held:
            user, thread = self._held.pop()
            _THREADS[id(user)].remove(thread)
            if not _THREADS[id(user)]:
                del _THREADS[id(user)]

    def wants(self, hook: str) -> bool:
        """Returns whether any callback overrides the hook of that name, in its class or on the instance.

        A loop that calls `on_execution_end` may skip hooks with the attribute `is_for_other_loops`.
        """
        return any(_overrides(callback, hook) for callback in self.callbacks)

    def wants_batch_hooks(self, phase: str) -> bool:
        """Returns whether any callback must be called for every batch of "train", "test" or "predict"."""
        return any(_overrides(callback, *_BATCH_HOOKS[phase]) for callback in self.callbacks)

    @property
    def save_on_error(self) -> bool:
        """Whether any callback may save the run when an exception ends it."""
        return any(_overrides(callback, "on_save_point") and getattr(callback, "save_on_error", True)
                   for callback in self.callbacks)

    def run_user_code(self) -> bool:
        """Returns whether any callback runs code that is not the trainer's."""
        return any(isinstance(callback, _OF_FUNCTIONS) or not type(callback).__module__.startswith("trainer.")
                   for callback in self.callbacks)

    def may_stop_differently(self, phase: str) -> bool:
        """Returns whether a callback may end "train", "test" or "predict" at another batch than other processes."""
        return any(not callback.stops_consistently and _overrides(callback, *_BATCH_HOOKS[phase], "on_execution_end")
                   for callback in self.callbacks)

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        steps, saves = [], []
        for callback in self._called:
            step = callback.next_sync_step(phase, batch)
            if step is None:
                continue
            step = as_count(f"{type(callback).__name__}.next_sync_step", step, batch,
                            f"the number of a batch, {batch} or a later one, or None")
            steps.append(step)
            if callback.saves:
                saves.append(step)
        if phase == "train":
            self._save_at = min(saves, default=None)
        return min(steps, default=None)

    def check_monitors(
        self, available: Iterable[str], each_epoch: Iterable[str] | None = None, batches: Iterable[str] | None = None
    ) -> None:
        """Lets the callbacks reject a monitor, or another name of a log, that will not exist.

        Callbacks after an `on_epoch_end` that may add any log (see `adds_logs`) check the first logs instead.

        Args:
          available: names of all logs that any epoch will have.
          each_epoch: names of the logs that all epochs will have; by default `available`.
          batches: names of the logs that all batches will have; by default `each_epoch`.

        Raises:
          ValueError: if a monitored log is neither available nor added by a callback.
          KeyError: if the name of a file has another log.
        """
        in_some = frozenset(available)
        in_each = in_some if each_epoch is None else frozenset(each_epoch)
        of_batches: frozenset[str] | None = in_each if batches is None else frozenset(batches)
        for callback in self.callbacks:
            names_of_added = getattr(callback.on_epoch_end, "added_log_keys", None)
            if names_of_added is None:
                return
            added = names_of_added(self._model)
            in_some, in_each = in_some | added, in_each | added
            if _overrides(callback, *_BATCH_HOOKS["train"]):
                of_batches = None
            callback.check_log_names(LogNames(in_each, in_some, of_batches))

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of callbacks that have a state, by class name ("EarlyStopping", "EarlyStopping_1"...)."""
        return {name: callback.state_dict() for name, callback in self._with_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores every callback from a state returned by `state_dict`.

        Raises:
          ValueError: if `state` belongs to other callbacks.
        """
        received = sorted(name for name, _ in self._with_state())
        if sorted(state) != received:
            raise ValueError(
                f"`callbacks` do not match the state. Received: {received}, expected: {sorted(state)}. "
                "Resume with the same callbacks."
            )
        for name, callback in self._with_state():
            if callback in self._called:
                callback.load_state_dict(state[name])

    def snapshot_side_effects(self) -> dict[str, Any]:
        """Returns the notes of the callbacks that have a note, by their names in `state_dict`."""
        notes = {name: callback.snapshot_side_effects() for name, callback in self._with_state()}
        return {name: note for name, note in notes.items() if note is not None}

    def rollback_side_effects(self, note: Mapping[str, Any]) -> None:
        for name, callback in self._with_state():
            if name in note and callback in self._called:
                callback.rollback_side_effects(note[name])

    def _with_state(self) -> Iterator[tuple[str, Callback]]:
        counts: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            count = counts.get(name, 0)
            counts[name] = count + 1
            own = [_overrides(callback, hook) for hook in ("state_dict", "load_state_dict")]
            if isinstance(callback.state_attributes, str):
                raise TypeError(f"`{type(callback).__name__}.state_attributes` must be a tuple of names. Received: a "
                                f"str. Write ({callback.state_attributes!r},).")
            if own == [True, False]:
                raise TypeError(f"`{type(callback).__name__}` defines `state_dict` and not `load_state_dict`, so it "
                                "could not be restored. Define both, or name attributes in `state_attributes`.")
            if callback.state_attributes or own[0]:
                yield (f"{name}_{count}" if count else name), callback

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._call("on_train_begin", logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._call("on_train_end", logs)
        kinds = {type(callback) for callback in self.callbacks}
        if History in kinds and not any(issubclass(kind, TerminateOnNaN) for kind in kinds):  # logs have been read then
            warn_of_non_finite_logs(self.model, logs or {})

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._call("on_epoch_begin", logs, epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = {} if logs is None else logs
        for callback in self._flushed(self._called):
            callback.on_epoch_end(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_train_batch_end", batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_batch_begin", batch, logs)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_batch_end", batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._call("on_test_begin", logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._call("on_test_end", logs)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_test_batch_end", batch, logs)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._call("on_predict_begin", logs)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        self._call("on_predict_end", logs)

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_predict_batch_begin", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._call_batch("on_predict_batch_end", batch, logs)

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        logs = {} if logs is None else logs
        called = self._called
        if phase == "train" and batch == self._save_at:
            # Callbacks with deferred reads must know of this execution before another callback saves.
            first = [callback for callback in called if _overrides(callback, "flush")]
            for callback in first:
                callback.on_execution_end(phase, batch, logs)
            called = self._flushed(callback for callback in called if callback not in first)
        for callback in called:
            callback.on_execution_end(phase, batch, logs)

    def flush(self) -> bool:
        answers = [callback.flush() for callback in self._called]
        return any(answers)

    def _flushed(self, callbacks: Iterable[Callback]) -> list[Callback]:
        """Flushes all callbacks; returns the `callbacks` that may act, without savers if the weights are non-finite."""
        is_non_finite = self.flush()
        return [callback for callback in callbacks if not (is_non_finite and callback.saves)]

    def release(self) -> None:
        try:
            for callback in self._called:
                callback.release()
        finally:
            self.let_go()

    def __enter__(self) -> CallbackList:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def on_save_point(self, point: SavePoint) -> None:
        for callback in self._called:
            callback.on_save_point(point)

    # Positional and keyword arguments are as in Keras, because a user's lambda may choose the names of positional
    # arguments.

    def _call(self, hook: str, logs: Logs | None, *numbers: int) -> None:
        logs = {} if logs is None else logs
        for callback in self._called:
            getattr(callback, hook)(*numbers, logs)

    def _call_batch(self, hook: str, batch: int, logs: Logs | None) -> None:
        logs = {} if logs is None else logs
        for callback in self._called:
            getattr(callback, hook)(batch, logs=logs)


class History(Callback):
    """Records the logs of every epoch. Every `fit` has a history and returns it.

    Without other callbacks, the logs of an epoch are fetched at the end of the next epoch or of the training, or when
    `history` is read. The device then already has the steps of the next epoch.

    The `repr`, also in notebooks, is a table with a row for each epoch.

    Attributes:
      history: values of each log, as a list of Python floats. A log that some epochs lack (a validation with
        `validation_freq=2`) has a shorter list.
      epoch: indices of the recorded epochs, from 0; cleared when `fit` begins.
      timing: time of the last complete `fit`: the seconds that the host waited for "data", for a "compile" and for the
        "device", the seconds in "callbacks", on a "checkpoint" and in the loop itself ("host"), their sum "total", and
        "rows_per_sec", the training rows per second without compilation.

    Example:

    >>> history = History()
    >>> history.on_train_begin()
    >>> history.on_epoch_end(0, {"loss": 0.5})
    >>> history.history, history.epoch
    ({'loss': [0.5]}, [0])
    >>> history
    History of 1 epoch
    epoch  loss
    -----------
        1   0.5
    """

    state_attributes = ("history", "epoch", "_epochs")
    reads_late = False  # whether `history` cannot be read while it is an epoch behind

    def __init__(self):
        self.history = {}
        self.epoch: list[int] = []
        self.timing: dict[str, float] = {}

    @property
    def history(self) -> dict[str, list[Any]]:
        self._read_unread()
        return self._history

    @history.setter
    def history(self, history: dict[str, list[Any]]) -> None:
        self._history = history
        self._epochs: dict[str, list[int]] = {}  # of the values
        self._unread: tuple[int, Mapping[str, Any]] | None = None

    def __getitem__(self, log: str) -> NoReturn:
        raise TypeError(f"A History has its logs in an attribute. Write `history.history[{log!r}]`.")

    def __getstate__(self) -> Any:
        self._read_unread()  # the logs are on devices
        return super().__getstate__()

    def epochs_of(self, log: str) -> list[int]:
        """Returns the indices, from 0, of the epochs that have a value of a log.

        Raises:
          TypeError: if the name is not a string.
          KeyError: if there is no such log; the message lists the known logs.

        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.on_epoch_end(1, {"loss": 0.5, "val_loss": 0.5})
        >>> history.epochs_of("val_loss")
        [1]
        """
        require_text(log=log)
        if log not in self.history:
            known = ", ".join(map(repr, self.history)) or "none yet"
            raise KeyError(f"The history has no log {log!r}. Known logs: {known}.")
        values = self.history[log]
        epochs = self._epochs.get(log, [])
        # Values may be assigned.
        return list(epochs) if len(epochs) == len(values) else (
            list(self.epoch) if len(self.epoch) == len(values) else list(range(len(values))))

    def plot(self, *metrics: str) -> Figure:
        """Returns a matplotlib figure with an axis for each metric: training and validation over the epochs.

        A notebook shows it, and `history.plot().savefig("curves.png")` writes it.

        Args:
          *metrics: names of metrics, such as "loss"; none for all metrics. "val_loss" is drawn with "loss" and is not a
            valid name here.

        Raises:
          ImportError: if matplotlib is not installed.
          TypeError: if a metric is not a string.
          ValueError: if the history lacks a metric, or has no numbers.
        """
        return curves(self.history, {log: self.epochs_of(log) for log in self.history}, metrics or None)

    def __repr__(self) -> str:
        count = f"{len(self.epoch)} epoch{'s' * (len(self.epoch) != 1)}"
        return f"History of {count}" + (f"\n{tables.as_text(self._table())}" if self.history else "")

    def _repr_html_(self) -> str:
        return tables.as_html(self._table())

    def _table(self) -> list[list[str]]:
        return tables.table_rows(self.history, {log: self.epochs_of(log) for log in self.history})

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        model.history = self

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epoch = []

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = logs or {}
        if self.reads_late:
            begin_fetch(logs)
        self._read_unread()
        self.epoch.append(epoch)
        self._unread = epoch, logs
        if not self.reads_late:
            self._read_unread()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._read_unread()

    def _read_unread(self) -> None:
        if self._unread is None:
            return
        epoch, logs = self._unread
        values = list(logs.items())  # may be interrupted, or fail
        self._unread = None
        for name, value in values:
            self._history.setdefault(name, []).append(_python_number(value))
            self._epochs.setdefault(name, []).append(epoch)


def _overrides(callback: Callback, *hooks: str) -> bool:
    """Returns whether a callback has one of the hooks, on the class or on the instance, and this loop must call it."""
    for hook in hooks:
        method = getattr(callback, hook)
        function = getattr(method, "__func__", method)
        if function is not getattr(Callback, hook) and not getattr(function, "is_for_other_loops", False):
            return True
    return False


def _hint(value: object) -> str:
    """Returns a sentence on the callback that a value may be meant for."""
    if isinstance(value, type):
        return f" Give an instance, not the class: `{value.__name__}(...)`."
    if isinstance(value, str):
        return f" Give an instance, such as `trainer.callbacks.{value if value.isidentifier() else 'EarlyStopping'}()`."
    if type(value).__module__.endswith("schedules"):
        return " A schedule belongs to the optimizer: `Adam(learning_rate=schedule)`."
    if callable(value):
        return " Say when a function is called: `trainer.callbacks.LambdaCallback(on_epoch_end=function)`."
    return ""


def _check_hooks(callback: Callback) -> None:
    """Raises TypeError for a user's hook that cannot be called with its arguments; warns of names that are no hooks."""
    if type(callback).__module__.startswith("trainer.") and not isinstance(callback, LambdaCallback):
        return
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks:
            warnings.warn(f"`{type(callback).__name__}.{name}` is not a hook, so `fit` does not call it. "
                          f"{near_hint(name, hooks)}", stacklevel=user_stacklevel())
    for hook, names in _ARGUMENTS.items():
        if not _overrides(callback, hook):
            continue
        try:
            signature = inspect.signature(getattr(callback, hook))
        except (TypeError, ValueError):  # of a function of C
            continue
        try:
            if "batch" in names:  # as `_call_batch` calls it
                signature.bind("batch", logs={})
            else:
                signature.bind(*names)
        except TypeError:
            if is_method := hook not in vars(callback):
                signature = inspect.signature(getattr(type(callback), hook))
            wanted = ", ".join(("self", *names) if is_method else names)
            raise TypeError(f"`{type(callback).__name__}.{hook}` must be `{hook}({wanted}=None)`. Received: "
                            f"{hook}{signature}.") from None


def _check_place(callback: Callback) -> None:
    if callback.runs_on not in ("all", "chief"):
        raise ValueError(f"`{type(callback).__name__}.runs_on` must be 'all' or 'chief'. "
                         f"Received: {callback.runs_on!r}.")
    if callback.runs_on == "chief" and _overrides(callback, "next_sync_step"):
        raise TypeError(f"`{type(callback).__name__}` runs on the chief alone, and cannot have a `next_sync_step`: all "
                        "processes must run the same batches at once. Let it run on all, and write on the chief.")


def _python_number(value: Any) -> Any:
    """Returns an array of one number as a Python number, and anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
