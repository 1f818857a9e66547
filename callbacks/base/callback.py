"""The base class of callbacks: the hooks and the time of each call.

Owns the names, arguments and meaning of the hooks. Knows nothing of the loop that calls them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from trainer.callbacks.base.run_protocol import Run, SavePoint
from trainer.core.errors import unknown_argument
from trainer.core.foreign_names import ForeignNames
from trainer.core.types import Phase

Logs: TypeAlias = dict[str, Any]
"""The loss and the metrics by name, and what callbacks add; values may still be on the device (see `LazyLogs`)."""



def adds_logs(*keys: str, of_model: Callable[[Any], Iterable[str]] | None = None) -> Callable[[Any], Any]:
    """Marks an `on_epoch_end` that adds these keys, and no others, to the logs.

    The loop checks a monitor before training if it knows the logs that earlier callbacks add. An `on_epoch_end` without
    this mark may add any log. The mark belongs to the function: a subclass that overrides the hook does not inherit it.

    Args:
      *keys: names of the added logs; empty for a hook that only reads.
      of_model: returns further names for the model of the run, such as a rate for each of its optimizers.

    Example:

    >>> class Stopwatch(Callback):
    ...     @adds_logs("seconds")
    ...     def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
    ...         logs["seconds"] = 1.0
    """

    def mark(hook: Any) -> Any:
        hook.added_log_keys = lambda model: frozenset((*keys, *(() if of_model is None else of_model(model))))
        return hook

    return mark


class LogNames(NamedTuple):
    """Names of the logs that a `fit` will have, as far as they are known before it trains.

    Attributes:
      each_epoch: logs of each `on_epoch_end`.
      some_epochs: logs of epochs with a validation, including `each_epoch`.
      batches: logs of each batch; None if a callback may add to them.
    """

    each_epoch: frozenset[str]
    some_epochs: frozenset[str]
    batches: frozenset[str] | None


class Callback(ForeignNames):
    """Base class of callbacks, which act at given points of `fit`, `evaluate` and `predict`.

    Override the hooks of interest; `super().__init__()` may be left out. `fit` calls the hooks in this order::

        on_train_begin
          on_epoch_begin
            on_train_batch_begin, on_train_batch_end      each batch
            on_execution_end                              each group of batches that ran as one execution
            on_save_point                                 after each execution
            on_test_begin ... on_test_end                 if this epoch is followed by a validation
          on_epoch_end
          on_save_point
        on_train_end

    `evaluate` calls the `test` hooks, and `predict` the `predict` hooks. Epochs count from 0, and batches count from 0
    in each epoch. A trainer passes `logs` as a dict, never None. Its values may still be on the device: reading the
    first log waits for the device (see `LazyLogs`), so frequent hooks should read rarely. If a callback overrides a
    batch hook, the loop calls it for every batch, which costs time. Prefer `on_execution_end` for hooks that do not
    need every batch.

    Attributes:
      model: model in training, evaluation or prediction (see `Run`).
      params: dict with "verbose", "epochs" and "steps" (None if unknown).
      state_attributes: names of the attributes that a checkpoint saves, so that a run resumes exactly (see
        `state_dict` for the allowed values).
      runs_on: with several processes, "all" to call the hooks in each process, or "chief" to call them in the first
        process only, for callbacks that write files or print. All processes must be given the same callbacks, because
        callbacks decide which batches run together. A "chief" callback cannot use operations that need all processes:
        `evaluate`, weights that are split over processes, `next_sync_step`.
      saves: whether the callback saves the trained weights in `on_epoch_end`, or in `on_execution_end` at a sync point
        (a batch named by `next_sync_step`). Neither is called there if another callback finds the weights non-finite
        (see `flush`).
      stops_consistently: whether the callback sets `model.stop_training` at the same batch in every process, if it
        sets it. Otherwise the processes synchronize after each execution, which waits for the device.
      run_folder: folder that belongs to the run, where `fit` keeps a `run.json` (see `RunRecord`); None for no folder.

    Example:

    >>> class Printer(Callback):
    ...     def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
    ...         print(epoch, logs["loss"])
    >>> Printer().on_epoch_end(0, {"loss": 0.5})
    0 0.5
    """

    _foreign_names = {
        "validation_data": "Give the data to the callback: `MyCallback(x_val, y_val)`. The results of `fit` on its "
                           "`validation_data` are in `logs` of `on_epoch_end`, such as `logs[\"val_loss\"]`.",
    }
    # Class attributes, so that a subclass need not call super().__init__().
    params: Mapping[str, Any] | None = None
    _model: Any = None
    state_attributes: tuple[str, ...] = ()
    runs_on: str = "all"
    saves: bool = False
    stops_consistently: bool = False
    run_folder: str | None = None

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        if options:
            parameters = inspect.signature(cls.__init__).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            for name in () if takes_any else sorted(options.keys() - set(parameters)):
                raise unknown_argument(cls.__name__, name, parameters)
        return super().__new__(cls)

    @property
    def stop_training(self) -> bool:
        """Not of callbacks, but of `model`."""
        if "stop_training" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'stop_training'. It is the model's: "
                                 "`self.model.stop_training`.", name="stop_training", obj=self)
        return vars(self)["stop_training"]

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        warnings.warn(f"`{type(self).__name__}` sets its own `stop_training`, which ends nothing. "
                      "`self.model.stop_training = True` ends the training.", stacklevel=2)
        vars(self)["stop_training"] = value

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Sets `params`; called once before each run."""
        self.params = params

    def __getstate__(self) -> Any:
        """Returns the attributes for a copy or a pickle, which has no model: its weights are on devices."""
        state = super().__getstate__()
        return {**state, "_model": None} if isinstance(state, dict) else state

    def set_model(self, model: Run) -> None:
        """Sets `model`; called once before each run."""
        self._model = model

    @property
    def model(self) -> Run:
        """The model of the run; None before the first run."""
        return self._model

    if not TYPE_CHECKING:  # for type checkers it is read-only

        @model.setter
        def model(self, value):
            raise AttributeError(f"`model` of the callback {type(self).__name__!r} cannot be set: `fit` gives it the "
                                 "model in training. Leave it out of `__init__`, or keep a model under another name: "
                                 "`self.other = model`.", name="model", obj=self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that `load_state_dict` needs to continue from here.

        The values are checkpointable: None, numbers, text, bytes and arrays, in lists, tuples and dicts. The containers
        are copies; the arrays are not.
        """
        return {name: copied_containers(getattr(self, name)) for name in self.state_attributes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state returned by `state_dict`.

        Called after `on_train_begin` and, in mid-epoch, after `on_epoch_begin`. These hooks reset the callback.

        Raises:
          ValueError: if the names in `state` differ from the names that this callback saves.
        """
        if set(state) != set(self.state_attributes):
            raise ValueError(f"`state` is not of {type(self).__name__}: it has {sorted(state)}. Expected: "
                             f"{list(self.state_attributes)}.")
        for name in self.state_attributes:
            setattr(self, name, copied_containers(state[name]))

    def snapshot_side_effects(self) -> Any:
        """Returns the note that `rollback_side_effects` needs, as JSON-serializable data, or None.

        Called after `on_train_begin` in a run that saves its state and has no saved state yet.
        """
        return None

    def rollback_side_effects(self, note: Any) -> None:
        """Undoes the side effects of a run that was killed before its first save.

        Called after `on_train_begin` of the replacement run. Keras has no such hook.

        Args:
          note: return value of `snapshot_side_effects` in the killed run.
        """

    def check_log_names(self, names: LogNames) -> None:
        """Raises an error if this `fit` will lack a log that the callback needs.

        Called before the first step compiles, unless an earlier callback may add any log (see `adds_logs`). Keras has
        no such hook.
        """

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called when `fit` begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called when `fit` ends, with the logs of the last epoch; not called if an exception ends `fit`."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before the first batch of an epoch of `fit`."""

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after an epoch of `fit` and its validation.

        Args:
          epoch: index of the epoch, from 0.
          logs: loss and metrics of the epoch, and of the validation with the prefix "val_". Later callbacks, including
            `History`, see the values that a hook assigns here.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before a batch of `fit`; calls `on_batch_begin`."""
        self.on_batch_begin(batch, logs=logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch of `fit`, with the epoch's loss and metrics so far; calls `on_batch_end`."""
        self.on_batch_end(batch, logs=logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Alias of `on_train_batch_begin`, which calls it."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Alias of `on_train_batch_end`, which calls it."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Called when `evaluate` or a validation begins."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Called when `evaluate` or a validation ends, with its loss and metrics."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before a batch of `evaluate` or of a validation."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch of `evaluate` or of a validation, with the loss and metrics so far."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Called when `predict` begins."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Called when `predict` ends."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before a batch of `predict`."""

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch of `predict`, with its outputs as `logs["outputs"]`."""

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        """Returns the index of the batch, `batch` or later, at which the next execution must end at the latest.

        The loop calls `on_execution_end` right after that batch. None, the default, sets no limit.

        Args:
          phase: "train" or "test".
          batch: index of the first batch of the execution, from 0 in the epoch.
        """
        return None

    def flush(self) -> bool:
        """Performs deferred work. Called before the run or the model is saved, and before every `on_epoch_end`.

        Keras has no such hook. It may be called at any time in `fit`, and several times in a row.

        Returns:
          Whether the weights are non-finite, so that `fit` saves nothing more; the same value in all processes.
        """
        return False

    def release(self) -> None:
        """Returns process-wide resources, such as `sys.stdout`. Called when a run ends, also by an exception.

        Keras has no such hook.
        """

    def on_save_point(self, point: SavePoint) -> None:
        """Called in `fit` whenever the whole run can be saved, after all other hooks of that moment.

        Keras has no such hook.

        Args:
          point: save point, which saves and restores the run (see `SavePoint`).
        """

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        """Called after each execution, which ran one batch or several fused batches. Keras has no such hook.

        Unlike a batch hook, it allows the loop to fuse batches.

        Args:
          phase: "train", "test" or "predict".
          batch: index of the last batch of the execution.
          logs: loss and metrics of the phase so far; for "predict", the outputs of the batch as "outputs".
        """


def copied_containers(value: Any) -> Any:
    """Returns a copy of `value` that copies lists, tuples and dicts and shares everything else."""
    if type(value) is dict:
        return {key: copied_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied_containers(item) for item in value)
    return value
