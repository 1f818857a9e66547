"""Numbers of logs, optimizers and weights by name, for callbacks that record them; and their form in JSON."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from trainer.callbacks.base.run_protocol import Run


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
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    return {} if optimizer is None else {"": optimizer}


def learning_rate_names(model: object) -> list[str]:
    """Returns the names of the logs of a run's learning rates: a name for each optimizer."""
    return [_rate_name(name) for name in optimizers_of(model) or [""]]


def _rate_name(optimizer: str) -> str:
    return f"learning_rate_{optimizer}" if optimizer else "learning_rate"


def learning_rates(model: object, known_only: bool = False) -> dict[str, float]:
    """Returns the learning rates of a run's model by log name. Reading them waits for the running steps.

    Args:
      model: model of the run.
      known_only: whether to leave out unknown rates.

    Raises:
      ValueError: if the rate of an optax transformation is unknown.
    """
    rates = {}
    for name, optimizer in optimizers_of(model).items():
        with contextlib.suppress(*[ValueError] * known_only):
            rates[_rate_name(name)] = float(optimizer.learning_rate)
    return rates


def named_weights(model: Run) -> dict[str, np.ndarray]:
    """Returns copies of the weights of a run's model by their paths in the parameters or the model state."""
    state = model.current_run.state
    paths = [path for tree in (state.params, state.model_state)
             for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return dict(zip(names, model.get_weights(), strict=True))


def as_json(value: object) -> Any:
    """Returns JSON-serializable data: arrays as numbers or lists, NaN and infinity as null, other objects as texts.

    >>> as_json({"loss": np.float32("nan"), "recall": np.array([1.0, 0.5]), 3: {"seed": 7}})
    {'loss': None, 'recall': [1.0, 0.5], '3': {'seed': 7}}
    """
    if hasattr(value, "dtype"):
        value = np.asarray(value).tolist()
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
