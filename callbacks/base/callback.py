"""The base class of callbacks: which hooks there are and when each is called.

Owns the hooks' names, arguments and meaning. Knows nothing of the loop that calls them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

from trainer.callbacks.base.run_protocol import Run, SavePoint
from trainer.core.errors import unknown_argument
from trainer.core.types import Phase

Logs: TypeAlias = dict[str, Any]
"""The loss and the metrics by name, and what callbacks add; values may still be on the device (see `LazyLogs`)."""



def adds_logs(*keys: str) -> Callable[[Any], Any]:
    """Marks an `on_epoch_end` that adds these keys, and no others, to the logs.

    What a monitor can find in the logs is known before training only if it is known what the callbacks before it add;
    an `on_epoch_end` without this mark may add anything. The mark belongs to the function, so that a subclass that
    overrides the hook does not inherit it.

    Args:
      *keys: the names that the hook adds; none, for a hook that only reads.

    Example:

    >>> class Stopwatch(Callback):
    ...     @adds_logs("seconds")
    ...     def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
    ...         logs["seconds"] = 1.0
    """

    def mark(hook: Any) -> Any:
        hook.added_log_keys = frozenset(keys)
        return hook

    return mark


class Callback:
    """Something that acts at the given points of `fit`, `evaluate` and `predict`.

    Subclass it and override the hooks of interest; `super().__init__()` may be left out. In `fit` the hooks are called
    in this order::

        on_train_begin
          on_epoch_begin
            on_train_batch_begin, on_train_batch_end      each batch
            on_execution_end                              each group of batches that ran as one execution
            on_save_point                                 likewise
            on_test_begin ... on_test_end                 if this epoch is followed by a validation
          on_epoch_end
          on_save_point
        on_train_end

    `evaluate` calls the `test` hooks, and `predict` the `predict` hooks. Epochs count from 0, and so do the batches of
    each epoch. `logs` is a dict, and never None, when a trainer calls a hook. Its values may still be on the device:
    reading the first log waits for the device (see `LazyLogs`), so a hook that is called often should read seldom.
    Overriding a batch hook makes the loop call it for every batch, which costs time; a hook that need not see every
    batch is better put into `on_execution_end`.

    Attributes:
      model: the model that is being trained, evaluated or used (see `Run`).
      params: a dict with "verbose", "epochs" and "steps" (None if unknown).
      state_attributes: names of the attributes that a checkpoint must keep for a run to resume exactly (see
        `state_dict` for what they can be).
      runs_on: where there are several processes, "all" if the hooks are called in each, or "chief" if in the first
        process alone, as is right for what writes files or prints. All processes must be given the same callbacks, as
        they decide which batches run at once. A callback for the chief cannot use what all processes have to do
        together: `evaluate`, weights that are split over processes, `next_sync_step`.
      saves: whether what is trained is saved by `on_epoch_end`, or by `on_execution_end` at a sync point, a batch that
        `next_sync_step` named. There neither is called if another callback finds the weights non-finite (see `flush`).
      stops_consistently: whether the callback sets `model.stop_training`, if it does, at the same batch in every
        process. If not, the processes ask each other after each execution, which costs a wait for the device.
      run_folder: a folder that is the run's own, in which `fit` keeps a `run.json` (see `RunRecord`); None for none.

    Example:

    >>> class Printer(Callback):
    ...     def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
    ...         print(epoch, logs["loss"])
    >>> Printer().on_epoch_end(0, {"loss": 0.5})
    0 0.5
    """

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

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Sets `params`; called once before each run."""
        self.params = params

    def set_model(self, model: Run) -> None:
        """Sets `model`; called once before each run."""
        self._model = model

    @property
    def model(self) -> Run:
        """The model of the run; None before the first run."""
        return self._model

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to continue from here.

        That is, as a checkpoint can hold it: None, numbers, text, bytes and arrays, in lists, tuples and dicts, which
        are copies; the arrays are not.
        """
        return {name: copied_containers(getattr(self, name)) for name in self.state_attributes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        Called after `on_train_begin` and, in the middle of an epoch, its `on_epoch_begin`, which start afresh.

        Raises:
          ValueError: if the names in `state` are not those that this callback keeps.
        """
        if set(state) != set(self.state_attributes):
            raise ValueError(f"`state` is not of {type(self).__name__}: it has {sorted(state)}. Expected: "
                             f"{list(self.state_attributes)}.")
        for name in self.state_attributes:
            setattr(self, name, copied_containers(state[name]))

    def note_of_beginning(self) -> Any:
        """Returns what `begin_anew` needs, as JSON can hold it; None if that is nothing.

        Called behind `on_train_begin` of a run that saves its state, and has none yet.
        """
        return None

    def begin_anew(self, note: Any) -> None:
        """Undoes what a run has left outside of the program that was killed before its state was saved.

        Called behind `on_train_begin` of the run that takes its place. Keras has no such hook.

        Args:
          note: what `note_of_beginning` returned in the run that was killed.
        """

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called when `fit` begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called when `fit` ends, with the logs of the last epoch; not if it ends by an exception."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before the first batch of an epoch of `fit`."""

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after an epoch of `fit` and its validation.

        Args:
          epoch: the number of the epoch, from 0.
          logs: the epoch's loss and metrics, and the validation's with the prefix "val_". What a hook assigns here is
            seen by the callbacks after it, `History` among them.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before a batch of `fit`; calls `on_batch_begin`."""
        self.on_batch_begin(batch, logs=logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch of `fit`, with the epoch's loss and metrics so far; calls `on_batch_end`."""
        self.on_batch_end(batch, logs=logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called by `on_train_batch_begin`: another name for it."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called by `on_train_batch_end`: another name for it."""

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
        """Returns the number of the batch, `batch` or a later batch, that the next execution must not go beyond.

        `on_execution_end` is then called right after that batch. None, the default, leaves it to the loop how many
        batches it runs at once.

        Args:
          phase: "train" or "test".
          batch: the number of the first batch of the execution, counted from 0 in the epoch.
        """
        return None

    def flush(self) -> bool:
        """Called before the run or the model is saved, and before every `on_epoch_end`: do now what was put off.

        Keras has no such hook. It may be called at any time in `fit`, and several times in a row.

        Returns:
          Whether the weights are non-finite, so that nothing more of this `fit` is to be saved; the same in all
          processes.
        """
        return False

    def release(self) -> None:
        """Called once a run is over, however it ended: give back what is the process's, such as `sys.stdout`.

        Keras has no such hook.
        """

    def on_save_point(self, point: SavePoint) -> None:
        """Called in `fit` wherever all of the run can be saved, after all other hooks of that moment.

        Keras has no such hook.

        Args:
          point: the moment, with which to save and to restore (see `SavePoint`).
        """

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        """Called after each execution, which ran one batch or several fused ones; Keras has no such hook.

        Unlike a batch hook it does not keep the loop from fusing batches.

        Args:
          phase: "train", "test" or "predict".
          batch: the number of the last batch that ran.
          logs: the phase's loss and metrics so far; of "predict", the batch's outputs as "outputs".
        """


def copied_containers(value: Any) -> Any:
    """Returns `value` with its lists, tuples and dicts copied and everything else shared."""
    if type(value) is dict:
        return {key: copied_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied_containers(item) for item in value)
    return value
