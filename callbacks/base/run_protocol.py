"""What a callback may use of the model that it is given.

Owns the `Run` protocol: the whole surface between callbacks and trainer. Callbacks import nothing from the trainer, so
that they can be tested with a fake model, and used in a custom training loop with any object that has these members.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

import numpy as np

from trainer.core.types import ArrayTree, Data, Verbose


class RunOptimizer(Protocol):
    """The part of an optimizer that callbacks read and set."""

    learning_rate: SupportsFloat
    """The factor of the next step; assigning a float takes effect from the next batch on."""

    iterations: int
    """How many updates were made. Reading it waits for the steps that are running."""


class RunState(Protocol):
    """The part of a training state that callbacks read: its trees, whose paths name the weights."""

    @property
    def params(self) -> Any: ...
    @property
    def model_state(self) -> Any: ...


class RunTiming(Protocol):
    """Where the time of a run goes."""

    rows: int
    """Training rows so far."""

    inner_secs: float
    """The seconds of other runs inside of this run, such as an `evaluate` that a callback calls."""

    def report(self) -> Mapping[str, float]:
        """Returns the seconds so far by what they went to, as in `History.timing`."""


class SavePoint(Protocol):
    """A moment of `fit` at which all of it can be saved: every callback has been told of what happened so far.

    All of a `fit` are the same object, whose attributes tell where the run is.
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
        """Begins to write a checkpoint of the run to a folder of them, in which the newest `keep` stay.

        During a validation that is the run as it was before it: a resumed run repeats the whole validation.

        Args:
          folder: where the checkpoints are; made if it is not there.
          keep: how many checkpoints to leave there.
          wait: whether to return only once it is written.

        Returns:
          Whether there is anything to write: not if a callback finds the weights non-finite (see `Callback.flush`).

        Raises:
          OSError: if it, or the last that was begun, cannot be written.
          RuntimeError: after an exception, if the run is no longer what it was at the save point before.
        """

    def restore(self, folder: str) -> str | None:
        """Brings the run, which is at its start, to where the newest whole checkpoint in `folder` was written.

        Returns:
          A sentence on where the run goes on; None if there is no checkpoint.

        Raises:
          ValueError: if no checkpoint is whole, or it is of another model, other data or other callbacks.
        """

    def start_from(self, folder: str) -> None:
        """Begins the run with the training state, and the count of batches, of the newest whole checkpoint in `folder`.

        Nothing else is taken from it: the data, the history and the callbacks begin.

        Raises:
          ValueError: if no checkpoint is whole, or it is of another model.
        """

    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises what `save` does."""

    def delete(self, folder: str) -> None:
        """Deletes the checkpoints in a folder."""

    def is_preempted(self, boundary: int) -> bool:
        """Returns whether all of several processes are to save here, as one of them has received SIGTERM.

        Args:
          boundary: the number of the moment, the same in all processes and greater each time.
        """


class RunDetails(Protocol):
    """What callbacks, and no other users, read and do: `model.current_run`."""

    @property
    def state(self) -> RunState:
        """The state, to be read at once and not kept: the next train step may reuse its buffers."""

    @property
    def timing(self) -> RunTiming:
        """The clock of the run."""

    @property
    def has_validation_data(self) -> bool:
        """Whether a `fit` with validation data is running, so that `model.validate` can be called."""

    @property
    def metric_directions(self) -> Mapping[str, str]:
        """Whether more ("max") or less ("min") is better, by log name without "val_"."""

    @property
    def validation_sets(self) -> Sequence[str]:
        """The names of the sets that `fit` validates on, with which their logs begin, such as "val_clean_loss".

        Empty where data to validate on have no name. A run may lack this property.
        """

    @property
    def keeps_averages(self) -> bool:
        """Whether moving averages of the weights are kept, with which `evaluate` and `predict` compute."""

    @property
    def shows_averages(self) -> bool:
        """Set to True to have `get_weights` and `save_weights` give the averages; training goes on with the weights."""

    @shows_averages.setter
    def shows_averages(self, value: bool) -> None: ...

    def adopt_averages(self) -> None:
        """Makes the moving averages the weights."""

    def begin_save(self, filepath: str | os.PathLike[str]) -> None:
        """Begins to write what `save` writes to a folder, as it is now; training may go on.

        Waits for the save before, and raises what went wrong in it. A run may lack this method and the next.

        Raises:
          OSError: if it, or the last that was begun, cannot be written.
        """

    def wait_for_save(self) -> None:
        """Returns once what was begun is written; raises what `begin_save` does."""

    def description(self) -> Mapping[str, Any]:
        """Returns what a `fit` that begins was started with, as plain data by name.

        These are "model", "seed", "strategy", "replicas", what "compile" and "fit" were given, and fingerprints of the
        "data". A run may lack this method.
        """

    def train_step_flops(self) -> float | None:
        """Returns how many floating-point operations a train step has over all devices, as XLA counts them.

        None if that is not known. A run may lack this method.
        """

    def train_step_text(self) -> str | None:
        """Returns the text of the compiled train step; None if it was not compiled. A run may lack this method."""


class Run(Protocol):
    """The model of a running `fit`, `evaluate` or `predict`, as callbacks see it.

    Example:

    >>> class Model:
    ...     name = "model"
    ...     stop_training = skip_non_finite = False
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
        """The run itself. A custom training loop may have a model without; see `run_of`."""

    skip_non_finite: bool
    """Whether updates with gradients that are not finite are left out."""

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all weights: the leaves of the parameters, then those of the model state."""

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Replaces all weights, given in the order of `get_weights`."""

    def save_weights(self, filepath: str | os.PathLike[str]) -> None:
        """Writes the weights to a safetensors file, replacing what is there; by one process."""

    def save(self, filepath: str | os.PathLike[str]) -> None:
        """Writes the training state, replacing what is there: to one file if the name has a suffix, else a folder."""

    def evaluate(
        self, x: Data, y: ArrayTree | None = None, *, verbose: Verbose = "auto",
        sample_weight: ArrayTree | None = None, callbacks: Any = None
    ) -> dict[str, Any]:
        """Returns the loss and the metrics over some data."""

    def validate(self) -> dict[str, Any]:
        """Returns the logs, without "val_", over the `validation_data` of the `fit` that is running.

        Raises:
          ValueError: if it has none.
        """


def run_of(model: object) -> RunDetails | None:
    """Returns the run of a model; None for a model of a custom training loop that has none."""
    return getattr(model, "current_run", None)
