"""What the loop needs of a model, and all that it may do with one."""

from __future__ import annotations

from typing import Any, Protocol

from trainer.core.train_state import TrainState
from trainer.data.reader import Reader
from trainer.data.sources.batches import Batch
from trainer.distribute import Strategy
from trainer.loop.run_context import RunContext
from trainer.step.compiled_phase import CompiledPhase


class TrainableState(Protocol):
    """The training state of a model, which steps replace."""

    @property
    def state_or_shapes(self) -> TrainState:
        """The state, for reading, or its shapes while it is being made: enough to trace and to compile a step."""

    @property
    def current(self) -> TrainState:
        """The state, for reading only: the next train step may reuse its buffers."""

    def take(self) -> TrainState:
        """Returns the state in buffers that may be donated."""

    def keep(self, state: TrainState) -> None:
        """Makes a state that a step returned the model's state."""


class TrainableModel(Protocol):
    """A model as the loop sees it.

    Attributes:
      strategy: places batches, and says whether there are several processes.
      state: the training state.
      run: the clock of the run, and the validation that callbacks may ask for.
    """

    @property
    def strategy(self) -> Strategy: ...
    @property
    def state(self) -> TrainableState: ...
    @property
    def run(self) -> RunContext: ...

    def stops(self, kind: str) -> bool:
        """Returns whether "train", "test" or "predict" shall end: Keras's `model.stop_training` and its relatives."""

    def set_stops(self, kind: str, stops: bool) -> None:
        """Sets what `stops` returns: at the beginning of a phase, and if another process has asked for its end."""

    def prepared_phase(self, kind: str, batch: Batch, batch_rows: int = 0) -> CompiledPhase:
        """Returns the compiled step of a phase, checked and traced on a first batch before anything compiles.

        Args:
          kind: "train", "test" or "predict".
          batch: the first batch.
          batch_rows: how many rows batches have as a rule, if that is known; otherwise 0.
        """

    def place_arrays(self, kind: str, reader: Reader, passes: int, requested: bool = False) -> Any | None:
        """Returns the reader's arrays on the devices, if batches are to be gathered there."""

    def run_settings(self) -> dict[str, Any]:
        """Returns, as plain data, what must not differ when a run is resumed, and is not in the state's arrays."""

    def program_digests(self, batch: Batch) -> dict[str, str]:
        """Returns short texts that differ if what a step is made of computes otherwise, by what that is.

        They tell apart what has one name in `run_settings`: two functions, or hyperparameters. What cannot be traced
        has none.

        Args:
          batch: the first batch, of which the shapes and the dtypes count.
        """

    def note_loss(self, value: Any) -> None:
        """Gives the metric of the loss its result over an epoch, as Keras's has it after a run."""

    def check_labels(self, batch: Batch) -> None:
        """Raises ValueError for labels that the loss cannot take. Leaves may have batches as a first axis."""
