"""`model.current_run`: the clock, the validation and the saves of the model's current run.

Owns how a nested run, such as an `evaluate` in a callback, counts for the outer run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.core.timing import Timing
from trainer.core.train_state import TrainState
from trainer.distribute import Strategy
from trainer.distribute.cluster import watchdog
from trainer.engine.model.core import saved_model
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.state_holder import StateHolder
from trainer.engine.saving.arrays.file_kinds import checked_path
from trainer.engine.saving.checkpoint import CheckpointWriter


class CurrentRun:
    """The current run of `fit`, `evaluate` or `predict`, or the last run.

    It is `model.current_run` for callbacks; `trainer.callbacks.RunDetails` documents these members.

    Attributes:
      timing: the clock of the run.
      sets: the names of the evaluated data sets; "" for a set without a name.
      validator: evaluates these sets while a `fit` with validation data runs; otherwise None.
      describe: returns the arguments and the data of a running `fit` as plain data; otherwise None.
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
        """Raises RuntimeError during a run; `fix` names the call to make later."""
        if self.timing.is_running:
            raise RuntimeError("The model is running, with a step that was compiled as `compile` said before. "
                               f"{fix} when `fit` has ended; `model.stop_training = True` ends it.")

    @contextlib.contextmanager
    def timed(self, timing: Timing | None = None, call: str = "", trains: bool = False) -> Iterator[Timing]:
        """Gives a run its own clock inside the block, and then restores the clock of the outer run.

        Args:
          timing: the clock; a new clock by default.
          call: the name of the method, if it uses the weights.
          trains: whether it changes them.

        Raises:
          RuntimeError: if another thread trains the model, or uses the weights that this run changes.
        """
        calls, mine = self._state.calls, (threading.current_thread(), call, trains)
        calls.append(mine)  # before the others are looked at: of two threads that begin together, one sees the other
        for thread, other, other_trains in list(calls):
            if call and other and thread is not mine[0] and (trains or other_trains):
                calls.remove(mine)
                raise self._state.conflict(call, other, thread, other_trains)
        outer = self.timing
        timing = self.timing = timing or Timing()
        observer = watchdog()
        if observer is not None:
            timing.on_phase = lambda phase: observer.progress(timing.steps, phase)
            timing.on_phase("host")
        try:
            yield timing
        finally:
            calls.remove(mine)
            timing.end()
            if observer is not None:
                observer.progress(timing.steps, "host" if outer.is_running else "idle")
            if outer.is_running:
                outer.inner_secs += timing.report()["total"]
                self.timing = outer

    @contextlib.contextmanager
    def validating(self, validator: Callable[[], dict[str, Any]] | None, sets: Sequence[str]) -> Iterator[None]:
        """Lets callbacks validate inside the block."""
        outer, self.validator, self.sets = (self.validator, self.sets), validator, sets
        try:
            yield
        finally:
            self.validator, self.sets = outer

    @contextlib.contextmanager
    def described(self, describe: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Lets callbacks ask for the arguments of the run inside the block."""
        outer, self.describe = self.describe, describe
        try:
            yield
        finally:
            self.describe = outer

    # --- for callbacks ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The state, for immediate reading only: the next train step may reuse its buffers."""
        return self._state.current

    @property
    def has_validation_data(self) -> bool:
        """Whether a `fit` with validation data is running, so that `model.validate` works."""
        return self.validator is not None

    @property
    def metric_directions(self) -> dict[str, str]:
        """The better direction, "max" or "min", of each log with a known direction."""
        directions = {"loss": "min", **self._configuration.metrics.directions}
        return directions | {f"{name}_{log}": direction for name in self.validation_sets
                             for log, direction in directions.items()}

    @property
    def validation_sets(self) -> Sequence[str]:
        """The names of the validation sets of the running `fit`; empty for sets without names."""
        return [name for name in self.sets if name]

    @property
    def keeps_averages(self) -> bool:
        """Whether `ema_decay` or the optimizer keeps averages of the weights."""
        return self._state.is_built and self._state.state_or_shapes.keeps_averages

    @property
    def shows_averages(self) -> bool:
        """Whether `get_weights` and `save_weights` use the averages; may be assigned."""
        return self._state.shows_averages

    @shows_averages.setter
    def shows_averages(self, value: bool) -> None:
        self._state.shows_averages = value

    def showing_averages(self) -> contextlib.AbstractContextManager[None]:
        """Lets `get_weights` and `weights` in the block use the averages, if the model keeps them."""
        return self._state.showing_evaluated()

    def adopt_averages(self) -> None:
        """Replaces the weights with the averages kept by `ema_decay` or an averaging optimizer."""
        self._state.adopt_averages()

    def description(self) -> dict[str, Any]:
        """Returns the arguments and the data of a starting `fit`, as plain data by name."""
        return self.describe() if self.describe else {}

    def begin_save(self, filepath: str | os.PathLike[str]) -> None:
        """Starts writing the state of `Model.save` to Orbax's files; see `trainer.callbacks.RunDetails`."""
        with self.timing.checkpoint:
            if self._writer is None:
                self._writer = CheckpointWriter()
            saved_model.begin_save(self._writer, checked_path("filepath", filepath), self._state.current,
                                   self._state.inputs, as_orbax=True)

    def wait_for_save(self) -> None:
        """Waits until all started saves are written."""
        if self._writer is not None:
            with self.timing.checkpoint:
                self._writer.wait()

    def train_step_flops(self) -> float | None:
        """Returns the FLOPs of a train step over all devices; None for an eager step, and before the step is traced."""
        phase = self._configuration.phases.get("train")
        flops = None if phase is None else phase.step_flops
        return None if flops is None else flops * self._strategy.num_replicas_in_sync

    def train_step_text(self) -> str | None:
        """Returns the XLA text of the compiled train step; None before it is compiled."""
        phase = self._configuration.phases.get("train")
        return None if phase is None else phase.compiled_text()
