"""train_and_evaluate: training with evaluations in between, in a single process or a cluster."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from trainer.core import errors
from trainer.core.calls.entry_points import explains_arguments
from trainer.engine.saving.checkpoint import CheckpointError, processes
from trainer.estimator.training import checkpoints, serving
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.evaluation_record import EVALUATOR_FILE_NAME, FILE_NAME, EvaluationRecord
from trainer.estimator.training.events import LOGGER
from trainer.estimator.training.hooks import CheckpointSaverListener, ScheduledSaveListener
from trainer.estimator.training.train_spec import EvalSpec, TrainSpec

_POLL_SECS = 1.0
_REMINDER_SECS = 600.0


@explains_arguments
def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec,
                       eval_spec: EvalSpec) -> tuple[dict[str, Any] | None, list[str | None] | None] | None:
    """Trains an estimator, and evaluates and exports its checkpoints.

    In a single process, new checkpoints are evaluated subject to `EvalSpec.throttle_secs`, and the last checkpoint
    always. A log line at the start describes the schedule. A call that was interrupted in an evaluation makes it when
    the same script starts again. In a cluster described by TF_CONFIG, chief and workers only train, and a process with
    the task "evaluator" evaluates the checkpoints in the folder. The evaluator's script must not create a multi-process
    strategy.

    Args:
      estimator: the estimator. In a cluster, all processes need the same `model_dir`, readable and writable by all.
      train_spec: data and end of the training.
      eval_spec: data and frequency of the evaluations.

    Returns:
      The metrics of the last evaluation and the results of its exporters; `(None, None)` if `max_steps` was already
      reached. None in a cluster.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the process has the task "ps" without a parameter server strategy, or is a second evaluator.

    Example:
      >>> estimator = LinearRegressor([numeric_column("x")])  # doctest: +SKIP
      >>> metrics, _ = train_and_evaluate(  # doctest: +SKIP
      ...     estimator, TrainSpec(train_input_fn, max_steps=1000), EvalSpec(eval_input_fn))

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/train_and_evaluate
    """
    for name, value, kind in (("estimator", estimator, Estimator), ("train_spec", train_spec, TrainSpec),
                              ("eval_spec", eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            raise errors.wrong_type(name, value, f"an object of the type `{kind.__name__}`")
    config = estimator.config
    if config.task_type == "evaluator":
        if config.task_id != 0:
            raise ValueError("There can be one evaluator: the task index of \"evaluator\" must be 0. Received: "
                             f"{config.task_id}.")
        _follow(estimator, train_spec, eval_spec)
        return None
    if config.task_type == "ps":
        raise ValueError("TF_CONFIG gives this process the task \"ps\", which serves where the script makes its "
                         "strategy: `RunConfig(train_distribute=trainer.distribute.ParameterServerStrategy())`. "
                         "Without one, leave \"ps\" out of the cluster: chief and workers train together.")
    if config.cluster_spec:
        _train(estimator, train_spec, [])
        return None
    return _train_and_evaluate(estimator, train_spec, eval_spec)


def _train_and_evaluate(estimator: Estimator, train_spec: TrainSpec,
                        eval_spec: EvalSpec) -> tuple[dict[str, Any] | None, list[str | None] | None]:
    record = EvaluationRecord(estimator.model_dir, FILE_NAME)
    evaluator = _Evaluator(estimator, eval_spec, record)
    max_steps = train_spec.max_steps
    last = checkpoints.newest(estimator.model_dir)
    step = 0 if last is None else checkpoints.step_of(last)
    if record.is_open and last is not None and step > (record.first_step or 0) and (
            checkpoints.is_of_an_ended_call(last) or (max_steps is not None and step >= max_steps)):
        LOGGER.info("The last call was interrupted after its training, of %d steps.", step)
        evaluator.evaluate_last(step, record.max_steps)
        record.close()
        if record.max_steps == max_steps or (max_steps is not None and step >= max_steps):
            return record.metrics, record.exports
    if max_steps is None or step < max_steps:
        if record.is_open and last is not None:
            record.resume(max_steps)
        else:
            record.begin(step, max_steps)
        LOGGER.info("%s", _announcement(estimator, eval_spec))
    _train(estimator, train_spec, [_EvaluationListener(evaluator, max_steps)])
    record.close()
    return record.metrics, record.exports


def _train(estimator: Estimator, train_spec: TrainSpec, listeners: list[CheckpointSaverListener]) -> None:
    estimator.train(train_spec.input_fn, hooks=train_spec.hooks, max_steps=train_spec.max_steps,
                    saving_listeners=[*train_spec.saving_listeners, *listeners])


def _announcement(estimator: Estimator, eval_spec: EvalSpec) -> str:
    config = estimator.config
    saved = "only at the end of the training"
    if config.save_checkpoints_steps is not None:
        saved = f"every {config.save_checkpoints_steps} steps"
    elif config.save_checkpoints_secs is not None:
        saved = f"every {config.save_checkpoints_secs:g} seconds"
    throttles = []
    if eval_spec.throttle_secs:
        throttles.append(f"{eval_spec.throttle_secs:g} seconds")
    if eval_spec.throttle_steps:
        throttles.append(f"{eval_spec.throttle_steps} steps")
    text = f"Start train and evaluate loop. A checkpoint is written {saved}; "
    if not throttles:
        return f"{text}each is evaluated."
    return (f"{text}one is evaluated if the last evaluation began at least {' and '.join(throttles)} before "
            "(`EvalSpec.throttle_secs`, `throttle_steps`), and the last of the training always.")


@dataclasses.dataclass
class _Evaluator:
    """Evaluates checkpoints and calls the exporters."""

    estimator: Estimator
    eval_spec: EvalSpec
    record: EvaluationRecord

    def evaluate(self, path: str, step: int, is_the_end: bool) -> None:
        spec, record = self.eval_spec, self.record
        folders = {exporter.name: os.path.join(self.estimator.model_dir, "export", exporter.name)
                   for exporter in spec.exporters}
        was_killed = step == record.began_step != record.step
        if not was_killed:
            record.begin_evaluation(step, {name: serving.newest_number(base) for name, base in folders.items()})
        metrics = self.estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, path, spec.name)
        before = {base: record.exports_before[name] for name, base in folders.items()
                  if was_killed and name in record.exports_before}
        with self.estimator._finishing_exports(before):
            exports = [exporter.export(self.estimator, folders[exporter.name], path, metrics, is_the_end)
                       for exporter in spec.exporters]
        record.end_evaluation(metrics, exports)

    def evaluate_last(self, step: int, max_steps: int | None) -> None:
        """Evaluates the newest checkpoint, of the last step of a training, unless that is done."""
        if step != self.record.step:
            self.evaluate_newest(step, is_the_end=max_steps is not None and step >= max_steps)

    def evaluate_newest(self, step: int, is_the_end: bool) -> None:
        path = self.estimator.latest_checkpoint()
        if path is None:
            raise RuntimeError("There was no new checkpoint after the training: its folder was emptied meanwhile.")
        self.evaluate(path, step, is_the_end)

    def reason_to_wait(self, step: int) -> str | None:
        """Returns the throttle that keeps a checkpoint from being evaluated; None if there is none."""
        spec, record = self.eval_spec, self.record
        if record.step is None or step == record.began_step != record.step:
            return None
        if 0 <= time.time() - record.began_at < spec.throttle_secs:
            return f"throttle_secs={spec.throttle_secs:g} seconds"
        if step - record.step < (spec.throttle_steps or 0):
            return f"throttle_steps={spec.throttle_steps}"
        return None


class _EvaluationListener(ScheduledSaveListener):
    """Evaluates the checkpoints of a training in the same process."""

    def __init__(self, evaluator: _Evaluator, max_steps: int | None):
        self._evaluator, self._max_steps = evaluator, max_steps

    def after_save(self, session: Any, global_step_value: int) -> None:
        record = self._evaluator.record
        if global_step_value in (0, record.first_step, record.step):
            return
        if self._max_steps is not None and global_step_value >= self._max_steps:
            return  # `end` evaluates the last checkpoint
        reason = processes.from_first(lambda: self._evaluator.reason_to_wait(global_step_value) or "")
        if reason:
            LOGGER.info("The checkpoint of step %d is not evaluated: the last evaluation, of step %d, began less than "
                        "%s before.", global_step_value, record.step, reason)
        else:
            self._evaluator.evaluate_newest(global_step_value, is_the_end=False)

    def after_resume(self, session: Any, global_step_value: int) -> None:
        self.after_save(session, global_step_value)

    def end(self, session: Any, global_step_value: int) -> None:
        self._evaluator.evaluate_last(global_step_value, self._max_steps)


def _follow(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Evaluates the newest checkpoints of another process's training until the training ends."""
    record = EvaluationRecord(estimator.model_dir, EVALUATOR_FILE_NAME)
    evaluator = _Evaluator(estimator, eval_spec, record)
    begin = reminded = time.monotonic()
    seen = record.step  # step of the last evaluation
    was_there = _newest_ended(estimator)
    if record.is_open and record.began_step == was_there != seen:  # killed in the last evaluation
        was_there = record.first_step
    else:
        record.begin(was_there, train_spec.max_steps)
    next_secs = begin + eval_spec.start_delay_secs
    while True:
        checkpoint = checkpoints.newest(estimator.model_dir)
        step = -1 if checkpoint is None else checkpoints.step_of(checkpoint)
        if checkpoint is not None:
            has_ended = checkpoints.is_of_an_ended_call(checkpoint) and step != was_there
            is_the_end = has_ended or (train_spec.max_steps is not None and step >= train_spec.max_steps)
            if step != seen and (is_the_end or time.monotonic() >= next_secs):
                next_secs = time.monotonic() + eval_spec.throttle_secs
                try:
                    evaluator.evaluate(checkpoint.path, step, is_the_end)
                except (CheckpointError, FileNotFoundError):  # replaced by newer checkpoints
                    if os.path.isdir(checkpoint.path):
                        raise
                    continue
                seen, reminded = step, time.monotonic()
            if is_the_end:
                LOGGER.info("The training has ended at step %d, which is evaluated.", step)
                record.close()
                return
        if time.monotonic() - reminded > _REMINDER_SECS:
            LOGGER.warning("The evaluator waits for a new checkpoint in %s.", estimator.model_dir)
            reminded = time.monotonic()
        time.sleep(_POLL_SECS)


def _newest_ended(estimator: Estimator) -> int | None:
    """Returns the step of an earlier finished training; None if there is none."""
    checkpoint = checkpoints.newest(estimator.model_dir)
    if checkpoint is None or not checkpoints.is_of_an_ended_call(checkpoint):
        return None
    return checkpoints.step_of(checkpoint)
