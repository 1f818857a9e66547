"""`model.current_run`: the clock, the validation and the saves of the run that a model is in.

Owns how a run inside of another one, such as an `evaluate` that a callback calls, counts for the outer run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.cluster import watchdog
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState
from trainer.distribute import Strategy
from trainer.model.core import saved_model
from trainer.model.core.configuration import Configuration
from trainer.model.core.state_holder import StateHolder
from trainer.saving.arrays.file_kinds import checked_path
from trainer.saving.checkpoint import CheckpointWriter


class CurrentRun:
    """The run of `fit`, `evaluate` or `predict` that a model is in, or else its last run.

    It is the `Run` of `trainer.callbacks`, which documents each member that callbacks use.

    Attributes:
      timing: the clock of the run.
      sets: the names of the sets that it evaluates on; "" for a set without a name.
      validator: evaluates on these sets, while a `fit` with validation data runs; else None.
      describe: returns the arguments and the data of a `fit` as plain data, while it runs; else None.
    """

    def __init__(self, state: StateHolder, configuration: Configuration, strategy: Strategy):
        self._state = state
        self._configuration = configuration
        self._strategy = strategy
        self._writer: CheckpointWriter | None = None
        self.timing = Timing()
        self.timing.end()
        self.validator: Callable[[], dict[str, Any]] | None = None
        self.sets: Sequence[str] = ()
        self.describe: Callable[[], dict[str, Any]] | None = None

    # --- for the loop ----------------------------------------------------------------------------------------------

    def check_is_idle(self, fix: str) -> None:
        """Raises RuntimeError while a run lasts; `fix` says what to do later."""
        if self.timing.is_running:
            raise RuntimeError("The model is running, with a step that was compiled as `compile` said before. "
                               f"{fix} when `fit` has ended; `model.stop_training = True` ends it.")

    @contextlib.contextmanager
    def timed(self, timing: Timing | None = None) -> Iterator[Timing]:
        """Gives a run a clock of its own while a block lasts; the end of an inner run gives the outer clock back."""
        outer = self.timing
        timing = self.timing = timing or Timing()
        observer = watchdog()
        if observer is not None:
            timing.on_phase = lambda phase: observer.progress(timing.steps, phase)
            timing.on_phase("host")
        try:
            yield timing
        finally:
            timing.end()
            if observer is not None:
                observer.progress(timing.steps, "host" if outer.is_running else "idle")
            if outer.is_running:
                outer.inner_secs += timing.report()["total"]
                self.timing = outer

    @contextlib.contextmanager
    def validating(self, validator: Callable[[], dict[str, Any]] | None, sets: Sequence[str]) -> Iterator[None]:
        """Lets callbacks validate while a block lasts."""
        outer, self.validator, self.sets = (self.validator, self.sets), validator, sets
        try:
            yield
        finally:
            self.validator, self.sets = outer

    @contextlib.contextmanager
    def described(self, describe: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Lets callbacks ask for the arguments of the run while a block lasts."""
        outer, self.describe = self.describe, describe
        try:
            yield
        finally:
            self.describe = outer

    # --- for callbacks ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The state, to be read at once and not kept: the next train step may reuse its buffers."""
        return self._state.current

    @property
    def has_validation_data(self) -> bool:
        """Whether a `fit` with validation data is running, so that `model.validate` can be called."""
        return self.validator is not None

    @property
    def metric_directions(self) -> dict[str, str]:
        """For each log whose better direction is known, "max" or "min"."""
        directions = {"loss": "min", **self._configuration.metrics.directions}
        return directions | {f"{name}_{log}": direction for name in self.validation_sets
                             for log, direction in directions.items()}

    @property
    def validation_sets(self) -> Sequence[str]:
        """The names of the sets that a `fit` which is running validates on; empty where they have none."""
        return [name for name in self.sets if name]

    @property
    def keeps_averages(self) -> bool:
        """Whether averages of the weights are kept, by `ema_decay` or by the optimizer."""
        return self._state.is_built and self._state.state_or_shapes.keeps_averages

    @property
    def shows_averages(self) -> bool:
        """Whether `get_weights` and `save_weights` give the averages; may be assigned."""
        return self._state.shows_averages

    @shows_averages.setter
    def shows_averages(self, value: bool) -> None:
        self._state.shows_averages = value

    def adopt_averages(self) -> None:
        """Makes the averages that `ema_decay` or an averaging optimizer keeps the weights."""
        self._state.adopt_averages()

    def description(self) -> dict[str, Any]:
        """Returns what a `fit` that begins was started with, as plain data by name."""
        return self.describe() if self.describe else {}

    def begin_save(self, filepath: str | os.PathLike[str]) -> None:
        """Begins to write what `Model.save` writes to a folder; see `trainer.callbacks.RunDetails`."""
        with self.timing.measure("checkpoint"):
            if self._writer is None:
                self._writer = CheckpointWriter()
            saved_model.begin_save(self._writer, checked_path("filepath", filepath), self._state.current,
                                   self._state.inputs)

    def wait_for_save(self) -> None:
        """Returns once all saves that were begun are written."""
        if self._writer is not None:
            with self.timing.measure("checkpoint"):
                self._writer.wait()

    def train_step_flops(self) -> float | None:
        """Returns the floating-point operations of a train step over all devices.

        None before the step is traced, and for an eager step.
        """
        phase = self._configuration.phases.get("train")
        flops = None if phase is None else phase.step_flops
        return None if flops is None else flops * self._strategy.num_replicas_in_sync

    def train_step_text(self) -> str | None:
        """Returns the compiled train step as XLA's text; None before it is compiled."""
        phase = self._configuration.phases.get("train")
        return None if phase is None else phase.text()
