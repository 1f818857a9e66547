"""Hooks with TensorFlow's names, and the callback that runs them.

Hooks run around each step and therefore prevent the fusion of steps. Callbacks of `trainer.callbacks` are accepted in
the same lists and cost less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.callbacks import Callback
from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.run_protocol import SavePoint
from trainer.core import arguments, errors


class SessionRunContext:
    """Context of a hook around a step.

    Attributes:
      session: the running `Model`; there are no sessions.
      stop_requested: whether `request_stop` was called.
    """

    def __init__(self, session: Any):
        self.session = session
        self.stop_requested = False

    def request_stop(self) -> None:
        """Ends the run after this step."""
        self.stop_requested = True


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """Results of a step.

    Attributes:
      results: the running loss and metrics of the call, and "global_step". Reading a value waits for the step.
    """

    results: Mapping[str, Any]


class SessionRunHook:
    """Base class of hooks; all methods do nothing by default.

    Example:
      >>> class StopAtLoss(SessionRunHook):
      ...     def after_run(self, run_context, run_values):
      ...         if run_values.results["loss"] < 0.1:
      ...             run_context.request_stop()

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/SessionRunHook
    """

    def begin(self) -> None:
        """Called once before the run."""

    def after_create_session(self, session: Any, coord: None) -> None:
        """Called when the model has its initial or restored weights; `session` is the model."""

    def before_run(self, run_context: SessionRunContext) -> None:
        """Called before each step. It must return None, because there is no graph to fetch from."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each step."""

    def end(self, session: Any) -> None:
        """Called once after the last step, unless an exception ended the run."""


class StopAtStepHook(SessionRunHook):
    """Stops the training after a number of steps, or at a global step.

    Args:
      num_steps: number of steps from the start of the call.
      last_step: global step to stop at.

    Raises:
      ValueError: if not exactly one argument is given.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None):
        if (num_steps is None) == (last_step is None):
            raise ValueError("Exactly one of `num_steps` and `last_step` must be given. Received: "
                             f"num_steps={num_steps}, last_step={last_step}.")
        arguments.check_counts(1, optional=True, num_steps=num_steps, last_step=last_step)
        self._num_steps, self._last_step = num_steps, last_step

    def after_create_session(self, session: Any, coord: None) -> None:
        if self._num_steps is not None:
            self._last_step = int(session.state.step) + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        assert self._last_step is not None, "the run has begun"
        if run_values.results["global_step"] >= self._last_step:
            run_context.request_stop()


class CheckpointSaverListener:
    """Base class of listeners, called around each checkpoint of a training.

    `session` is the model. Listeners must not train it.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/CheckpointSaverListener
    """

    def begin(self) -> None:
        """Called once before the training."""

    def before_save(self, session: Any, global_step_value: int) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, session: Any, global_step_value: int) -> bool | None:
        """Called when a checkpoint is on disk. Returning True stops the training."""
        return None

    def end(self, session: Any, global_step_value: int) -> None:
        """Called once at the end of the training, after the last checkpoint."""


class ScheduledSaveListener(CheckpointSaverListener):
    """A listener for the checkpoints of an uninterrupted training: for each of them, and for no other.

    It is not called for the checkpoint that a preempted process writes before it ends.
    """

    def after_resume(self, session: Any, global_step_value: int) -> None:
        """Called when an interrupted training continues from such a checkpoint: `after_save` may not have returned."""


def as_callbacks(argument: str, hooks: object) -> list[Callback]:
    """Returns hooks and callbacks, or None, as a list of callbacks for `fit` and `evaluate`.

    Raises:
      TypeError: if an element is neither a hook nor a callback.
    """
    return [_HookCallback(hook) if isinstance(hook, SessionRunHook) else hook for hook in check_hooks(argument, hooks)]


def check_hooks(argument: str, hooks: object) -> list[Any]:
    """Returns a hook, a callback, an iterable of both, or None as a list; raises TypeError for other elements."""
    hooks = [] if hooks is None else hooks
    if isinstance(hooks, SessionRunHook | Callback) or not isinstance(hooks, Iterable):
        hooks = [hooks]
    hooks = list(hooks)
    for hook in hooks:
        if not isinstance(hook, SessionRunHook | Callback):
            raise errors.wrong_type(argument, hook, "`SessionRunHook`s of `trainer.estimator`, or callbacks of "
                                    "`trainer.callbacks`")
    return hooks


def check_listeners(listeners: object) -> Sequence[CheckpointSaverListener]:
    """Returns a listener, an iterable of listeners, or None as a sequence; raises TypeError for other elements."""
    listeners = () if listeners is None else listeners
    listeners = tuple(listeners) if isinstance(listeners, Iterable) else (listeners,)
    for listener in listeners:
        if not isinstance(listener, CheckpointSaverListener):
            raise errors.wrong_type("saving_listeners", listener, "`CheckpointSaverListener`s of `trainer.estimator`")
    return listeners


class _Results(Mapping[str, Any]):
    """Logs and global step of a step, fetched on access."""

    def __init__(self, logs: Mapping[str, Any], model: Any):
        self._logs, self._model = logs, model

    def __getitem__(self, name: str) -> Any:
        return int(self._model.current_run.state.step) if name == "global_step" else self._logs[name]

    def __iter__(self) -> Any:
        yield from (*self._logs, "global_step")

    def __len__(self) -> int:
        return len(self._logs) + 1


class _HookCallback(Callback):
    """Runs a hook around each batch."""

    _model: Any  # a `Model`, with more attributes than the callback protocol

    def __init__(self, hook: SessionRunHook):
        self._hook = hook

    @property
    def model(self) -> Any:
        return self._model

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._context = SessionRunContext(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._context = SessionRunContext(self.model)
        self._hook.begin()

    def on_save_point(self, point: SavePoint) -> None:
        if point.kind == "start":  # the run is already restored
            self._hook.after_create_session(self.model, None)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._before()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._after(logs)
        if self._context.stop_requested:
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._hook.end(self.model)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._context = SessionRunContext(self.model)
        self._hook.begin()
        self._hook.after_create_session(self.model, None)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._before()

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._after(logs)
        if self._context.stop_requested:
            self.model.stop_evaluating = True

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._hook.end(self.model)

    on_predict_begin = on_test_begin

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._before()

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._after(logs)
        if self._context.stop_requested:
            self.model.stop_predicting = True

    on_predict_end = on_test_end

    def _before(self) -> None:
        wanted = self._hook.before_run(self._context)  # type: ignore[func-returns-value]
        if wanted is not None:
            raise TypeError(f"`{type(self._hook).__name__}.before_run` returned {errors.describe(wanted)}. There is no "
                            "graph to fetch from: return None, and read `run_values.results` in `after_run`.")

    def _after(self, logs: Logs | None) -> None:
        self._hook.after_run(self._context, SessionRunValues(_Results(logs or {}, self.model)))
