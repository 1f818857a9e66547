"""What a callback may use of the model that it is given.

Owns the `Run` protocol: the whole surface between callbacks and trainer. Callbacks import nothing from the trainer, so
that they can be tested with a fake model, and used in a loop of one's own with any object that has these members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsFloat

import numpy as np


class RunOptimizer(Protocol):
    """The part of an optimizer that callbacks read and set."""

    learning_rate: SupportsFloat
    """The factor of the next step; assigning a float takes effect from the next batch on."""

    iterations: int
    """How many updates were made. Reading it waits for the steps that are running."""


class RunState(Protocol):
    """The part of a training state that callbacks read: its trees, whose paths name the weights."""

    params: Any
    model_state: Any


class RunTiming(Protocol):
    """Where the time of a run goes."""

    def report(self) -> Mapping[str, float]:
        """Returns the seconds so far by what they went to, as in `History.timing`."""


class Run(Protocol):
    """The model of a running `fit`, `evaluate` or `predict`, as callbacks see it.

    Example:

    >>> class Model:
    ...     name = "model"
    ...     stop_training = False
    ...     optimizer = None
    ...     current_state = None
    ...     metric_directions = {"accuracy": "max"}
    ...     def get_weights(self):
    ...         return []
    ...     def set_weights(self, weights):
    ...         pass
    ...     def train_step_text(self):
    ...         return None
    >>> run: Run = Model()
    """

    name: str
    stop_training: bool
    """Set to True to end `fit` after the batch that is running."""

    optimizer: RunOptimizer

    history: Any
    """The `History` of the last `fit`; set by that callback."""

    current_state: RunState
    """The state, to be read at once and not kept: the next train step may reuse its buffers."""

    timing: RunTiming
    """The clock of the run."""

    metric_directions: Mapping[str, Literal["max", "min"]]
    """Whether more ("max") or less ("min") is better, by log name without "val_"."""

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all weights: the leaves of the parameters, then those of the model state."""

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Replaces all weights, given in the order of `get_weights`."""

    def train_step_text(self) -> str | None:
        """Returns the text of the compiled train step; None if it was not compiled. A model may lack this method."""
