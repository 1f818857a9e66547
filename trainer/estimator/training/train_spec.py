"""TrainSpec and EvalSpec: the arguments of `train_and_evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainer.core import arguments, errors
from trainer.core.calls.entry_points import foreign_arguments
from trainer.estimator.training import foreign_names
from trainer.estimator.training.exporters import Exporter
from trainer.estimator.training.functions import InputFn, check_input_fn, check_steps
from trainer.estimator.training.hooks import CheckpointSaverListener, check_hooks, check_listeners


@foreign_arguments(foreign_names.TRAIN_SPEC)
class TrainSpec:
    """Training data and stop condition of `train_and_evaluate`.

    Args:
      input_fn: as in `Estimator.train`.
      max_steps: global step to train to; None trains until the data end.
      hooks: as in `Estimator.train`.
      saving_listeners: as in `Estimator.train`.

    Raises:
      ValueError: if `max_steps` is less than 1.
      TypeError: if an argument has the wrong type.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/TrainSpec
    """

    def __init__(self, input_fn: InputFn, max_steps: int | None = None, hooks: Any = None,
                 saving_listeners: Sequence[CheckpointSaverListener] | None = None):
        self.input_fn = check_input_fn(input_fn)
        check_steps(max_steps=max_steps)
        self.max_steps = max_steps
        self.hooks = check_hooks("hooks", hooks)
        self.saving_listeners = check_listeners(saving_listeners)


@foreign_arguments(foreign_names.EVALUATE)
class EvalSpec:
    """Evaluation data, schedule and exporters of `train_and_evaluate`.

    Args:
      input_fn: as in `Estimator.evaluate`.
      steps: maximum number of steps per evaluation; None for all data.
      name: as in `Estimator.evaluate`.
      hooks: as in `Estimator.evaluate`.
      exporters: an `Exporter`, or several with distinct names, called after each evaluation.
      start_delay_secs: seconds that an evaluator process waits before its first evaluation.
      throttle_secs: minimum seconds between the starts of two evaluations. Checkpoints in between are not evaluated,
        except the last of the training.
      throttle_steps: minimum steps between two evaluations. It makes the choice of evaluated checkpoints independent of
        the machine's speed, together with `throttle_secs=0`.

    Raises:
      ValueError: if a number is too small, or two exporters have the same name.
      TypeError: if an argument has the wrong type.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/EvalSpec
    """

    def __init__(self, input_fn: InputFn, steps: int | None = 100, name: str | None = None, hooks: Any = None,
                 exporters: Exporter | Sequence[Exporter] | None = None, start_delay_secs: float = 120,
                 throttle_secs: float = 600, *, throttle_steps: int | None = None):
        self.input_fn = check_input_fn(input_fn)
        check_steps(steps=steps)
        if name is not None and not isinstance(name, str):
            raise errors.wrong_type("name", name, "a string, or None")
        arguments.require_non_negative(start_delay_secs=start_delay_secs, throttle_secs=throttle_secs)
        arguments.check_count("throttle_steps", throttle_steps, optional=True)
        self.steps = steps
        self.name = name
        self.hooks = check_hooks("hooks", hooks)
        self.exporters = _checked_exporters(exporters)
        self.start_delay_secs = start_delay_secs
        self.throttle_secs = throttle_secs
        self.throttle_steps = throttle_steps


def _checked_exporters(exporters: Any) -> tuple[Exporter, ...]:
    if exporters is None:
        return ()
    is_one = isinstance(exporters, Exporter) or not isinstance(exporters, Iterable)
    found = (exporters,) if is_one else tuple(exporters)
    for exporter in found:
        if not isinstance(exporter, Exporter):
            raise errors.wrong_type("exporters", exporter, "`Exporter`s of `trainer.estimator`")
        if not isinstance(exporter.name, str) or not exporter.name:
            raise ValueError(f"An exporter must have a name that is not empty. Received: {exporter.name!r}.")
    names = [exporter.name for exporter in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"`exporters` must have unique names. Such a name cannot be repeated: {name!r}.")
    return found
