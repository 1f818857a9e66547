"""The part of the model that a callback may use.

Owns the `Run` protocol, the whole interface between callbacks and trainer. Callbacks import only rooms of `core` from
the trainer, so they can be tested with a fake model, and used in a custom training loop with any object that has these
members.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, SupportsFloat

import numpy as np

from trainer.core.types import ArrayTree, Data, Verbose
from trainer.core.updates.spikes import SpikeRule


class RunOptimizer(Protocol):
    """Part of an optimizer that callbacks read and set."""

    learning_rate: SupportsFloat
    """The factor of the next step; assigning a float takes effect from the next batch on."""

    iterations: int
    """How many updates were made. Reading it waits for the steps that are running."""


class RunState(Protocol):
    """Part of a training state that callbacks read: its trees, whose paths name the weights."""

    @property
    def params(self) -> Any: ...
    @property
    def model_state(self) -> Any: ...


class RunTiming(Protocol):
    """Time spent by a run."""

    rows: int
    """Training rows so far."""

    inner_secs: float
    """The seconds of other runs inside of this run, such as an `evaluate` that a callback calls."""

    def report(self) -> Mapping[str, float]:
        """Returns the seconds so far by activity, as in `History.timing`."""


class SavePoint(Protocol):
    """A moment of `fit` at which the whole run can be saved, as every callback has seen all events so far.

    Each `fit` has a single instance, whose attributes describe the position of the run.
    """

    kind: str
    """"start" after `on_train_begin`, "batches" after an execution, "epoch" after `on_epoch_end`, "validation" after an
    execution of a validation; "error" where an exception has ended `fit` in the only process: what is saved then is the
    run at the save point before; "closed" once `fit` is over, however it ended."""

    epoch: int
    """The epoch, from 0, that the next batch belongs to."""

    batch: int
    """How many of its batches are done."""

    batches: int
    """How many batches were trained on since the first epoch began, before interruptions too."""

    is_at_limit: bool
    """Whether `fit` ends here because of `max_steps` or `max_time`: what is saved at this point can go on."""

    def save(self, folder: str, keep: int, wait: bool = False) -> bool:
        """Starts to write a checkpoint of the run to a folder of checkpoints, and keeps the newest `keep`.

        During a validation, the checkpoint holds the run before the validation: a resumed run repeats all of it.

        Args:
          folder: folder of the checkpoints; created if missing.
          keep: number of checkpoints to keep.
          wait: whether to return only after the checkpoint is written.

        Returns:
          Whether a checkpoint is written; False if a callback finds the weights non-finite (see `Callback.flush`).

        Raises:
          OSError: if this checkpoint or the previous checkpoint cannot be written.
          RuntimeError: after an exception, if the run has changed since the previous save point.
        """

    def restore(self, folder: str) -> str | None:
        """Restores the run, which is at its start, from the newest complete checkpoint in `folder`.

        Returns:
          A sentence that describes where the run continues; None if there is no checkpoint.

        Raises:
          ValueError: if no checkpoint is complete, or it is from another model, other data or other callbacks.
        """

    def start_from(self, folder: str) -> None:
        """Starts the run with the training state and the batch count of the newest complete checkpoint in `folder`.

        The data, the history and the callbacks start afresh.

        Raises:
          ValueError: if no checkpoint is complete, or it is from another model.
        """

    def roll_back(self, folder: str) -> str | None:
        """Gives the run the weights and the optimizer state of the newest complete checkpoint in `folder`.

        The data, the history, the callbacks and the number of the step continue.

        Returns:
          The path of the checkpoint; None if there is none.

        Raises:
          ValueError: if no checkpoint is complete, or it is from another model.
        """

    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises the errors of `save`."""

    def delete(self, folder: str) -> None:
        """Deletes the checkpoints in a folder."""

    def is_preempted(self, boundary: int) -> bool:
        """Returns whether all processes must save here, because a process has received SIGTERM.

        Args:
          boundary: number of the moment; the same in all processes, and increasing from call to call.
        """


class RunDetails(Protocol):
    """Run-time details for callbacks only: `model.current_run`."""

    @property
    def state(self) -> RunState:
        """State of the run. Read it at once and do not keep it: the next train step may reuse its buffers."""

    @property
    def timing(self) -> RunTiming:
        """Clock of the run."""

    @property
    def has_validation_data(self) -> bool:
        """Whether a `fit` with validation data is running, so that `model.validate` can be called."""

    @property
    def metric_directions(self) -> Mapping[str, str]:
        """Better direction, "max" or "min", by log name without "val_"."""

    @property
    def validation_sets(self) -> Sequence[str]:
        """Names of the validation sets of `fit`, as in the log "val_clean_loss".

        Empty if the validation data have no name. A run may lack this property.
        """

    @property
    def keeps_averages(self) -> bool:
        """Whether the run keeps moving averages of the weights, which `evaluate` and `predict` use."""

    @property
    def shows_averages(self) -> bool:
        """Whether `get_weights` and `save_weights` return the averages; training continues with the weights."""

    @shows_averages.setter
    def shows_averages(self, value: bool) -> None: ...

    def showing_averages(self) -> AbstractContextManager[None]:
        """Lets `get_weights` in the block return the weights that `evaluate` uses: the averages, if there are any.

        A run may lack this method.
        """

    def adopt_averages(self) -> None:
        """Replaces the weights by their moving averages."""

    def begin_save(self, filepath: str | os.PathLike[str]) -> None:
        """Starts to save the training state of the current model to a folder of Orbax; training may continue.

        Waits for the previous save and raises its error. A run may lack this method and `wait_for_save`.

        Raises:
          OSError: if this save or the previous save cannot be written.
          ImportError: if Orbax is not installed.
        """

    def wait_for_save(self) -> None:
        """Waits until the save is written; raises the errors of `begin_save`."""

    def description(self) -> Mapping[str, Any]:
        """Returns the settings of a starting `fit`, as plain data by name.

        The names are "model", "seed", "strategy", "replicas", "compile" and "fit" (their arguments), and "data"
        (fingerprints). A run may lack this method.
        """

    def train_step_flops(self) -> float | None:
        """Returns the number of floating-point operations of a train step over all devices, as counted by XLA.

        None if unknown. A run may lack this method.
        """

    def train_step_text(self) -> str | None:
        """Returns the text of the compiled train step; None if it is not compiled. A run may lack this method."""


class Run(Protocol):
    """The model of a running `fit`, `evaluate` or `predict`, as callbacks see it.

    Example:

    >>> class Model:
    ...     name = "model"
    ...     stop_training = skip_non_finite = False
    ...     spike_rule = None
    ...     optimizer = history = None
    ...     current_run = None
    ...     def get_weights(self):
    ...         return []
    ...     def set_weights(self, weights):
    ...         pass
    ...     def save_weights(self, filepath):
    ...         pass
    ...     def save(self, filepath):
    ...         pass
    ...     def evaluate(self, x, y=None, **options):
    ...         return {}
    ...     def validate(self):
    ...         return {}
    >>> run: Run = Model()
    """

    name: str
    stop_training: bool
    """Set to True to end `fit` after the batch that is running."""

    @property
    def optimizer(self) -> RunOptimizer: ...

    history: Any
    """The `History` of the last `fit`; set by that callback."""

    @property
    def current_run(self) -> RunDetails:
        """Details of the run. The model of a custom training loop may lack this attribute; see `run_detail`."""

    skip_non_finite: bool
    """Whether updates with gradients that are not finite are left out."""

    spike_rule: SpikeRule | None
    """Which updates are left out because their loss or gradient norm is a spike. A run may lack it."""

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all weights: first the leaves of the parameters, then the leaves of the model state."""

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Replaces all weights, given in the order of `get_weights`."""

    def save_weights(self, filepath: str | os.PathLike[str]) -> None:
        """Writes the weights to a safetensors file from one process, and replaces an existing file."""

    def save(self, filepath: str | os.PathLike[str]) -> None:
        """Writes the training state, to one file if the name has a suffix, else to a folder; replaces existing data."""

    def evaluate(
        self, x: Data, y: ArrayTree | None = None, *, verbose: Verbose = "auto",
        sample_weight: ArrayTree | None = None, callbacks: Any = None
    ) -> dict[str, Any]:
        """Returns the loss and the metrics over the given data."""

    def validate(self) -> dict[str, Any]:
        """Returns the logs, without "val_", over the `validation_data` of the running `fit`.

        Raises:
          ValueError: if `fit` has no validation data.
        """


def run_detail(model: object, name: str, default: Any = None) -> Any:
    """Returns a member of `model.current_run`; the default for the model of a custom training loop that lacks it."""
    return getattr(getattr(model, "current_run", None), name, default)
