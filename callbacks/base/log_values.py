"""Numbers of logs and optimizers by name, for callbacks that record them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of logs with their names, numbered if a log has several.

    >>> list(scalars({"loss": 0.5, "recall": np.array([1.0, 0.0])}))
    [('loss', 0.5), ('recall_0', 1.0), ('recall_1', 0.0)]
    """
    for name, value in values.items():
        numbers = np.asarray(value)
        if numbers.ndim == 0:
            yield name, float(numbers)
        else:
            yield from ((f"{name}_{index}", float(number)) for index, number in enumerate(numbers.ravel()))


def optimizers_of(model: Any) -> dict[str, Any]:
    """Returns the optimizers of a run's model by name; a single optimizer has the name ""."""
    optimizer = model.optimizer
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    return {} if optimizer is None else {"": optimizer}


def learning_rates(model: object) -> dict[str, float]:
    """Returns the known learning rates of a run's model. Reading them waits for the running steps."""
    rates = {}
    for name, optimizer in optimizers_of(model).items():
        with contextlib.suppress(ValueError):  # there is none, or several
            rates[f"learning_rate_{name}" if name else "learning_rate"] = float(optimizer.learning_rate)
    return rates
