"""`model.current_run`: what callbacks may read and do, but for what every user of a model does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.core.timing import Timing
from trainer.core.train_state import TrainState
from trainer.distribute import Strategy
from trainer.loop.run_context import RunContext
from trainer.model import saved_model
from trainer.model.configuration import Configuration
from trainer.model.state_holder import StateHolder
from trainer.saving.arrays.file_kinds import checked_path
from trainer.saving.checkpoint import CheckpointWriter


class CurrentRun:
    """The run of `fit`, `evaluate` or `predict` that a model is in, or else its last run.

    It is the `Run` of `trainer.callbacks`, which documents each member.
    """

    def __init__(self, state: StateHolder, configuration: Configuration, strategy: Strategy, context: RunContext):
        self._state = state
        self._configuration = configuration
        self._strategy = strategy
        self._context = context
        self._writer: CheckpointWriter | None = None

    @property
    def timing(self) -> Timing:
        """The clock of the run."""
        return self._context.timing

    @property
    def state(self) -> TrainState:
        """The state, to be read at once and not kept: the next train step may reuse its buffers."""
        return self._state.current

    @property
    def has_validation_data(self) -> bool:
        """Whether a `fit` with validation data is running, so that `model.validate` can be called."""
        return self._context.validator is not None

    @property
    def metric_directions(self) -> dict[str, str]:
        """For each log whose better direction is known, "max" or "min"."""
        directions = {"loss": "min", **self._configuration.metrics.directions}
        return directions | {f"{name}_{log}": direction for name in self._context.sets if name
                             for log, direction in directions.items()}

    @property
    def validation_sets(self) -> Sequence[str]:
        """The names of the sets that a `fit` which is running validates on; empty where they have none."""
        return [name for name in self._context.sets if name]

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
        return self._context.describe() if self._context.describe else {}

    def begin_save(self, filepath: Any) -> None:
        """Begins to write what `Model.save` writes to a folder; see `trainer.callbacks.RunDetails`."""
        with self.timing.measure("checkpoint"):
            if self._writer is None:
                self._writer = CheckpointWriter()
            saved_model.begin_save(self._writer, checked_path("filepath", filepath), self._state.current,
                                   self._state.inputs)

    def wait_for_save(self) -> None:
        """Returns once what was begun is written."""
        if self._writer is not None:
            with self.timing.measure("checkpoint"):
                self._writer.wait()

    def train_step_flops(self) -> float | None:
        """Returns how many floating-point operations a train step has over all devices.

        None before the step is traced, and for an eager one.
        """
        phase = self._configuration.phases.get("train")
        flops = None if phase is None else phase.step_flops
        return None if flops is None else flops * self._strategy.num_replicas_in_sync

    def train_step_text(self) -> str | None:
        """Returns the program that the train step was compiled to, as XLA's text; None if it did not compile yet."""
        phase = self._configuration.phases.get("train")
        return None if phase is None else phase.text()
