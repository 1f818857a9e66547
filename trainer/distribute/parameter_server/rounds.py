"""A step whose gradients several workers compute: what a server keeps of it until enough of its parts are there.

Only the first parts count, so that a step does not wait for the slowest workers (Chen et al., "Revisiting Distributed
Synchronous SGD", 2016).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.distribute.replica.state_reduction import Rules, over_parts

_LEAST_WEIGHT = 1e-12  # in the place of 0: parts that all weigh nothing have a mean, too

Leaves = dict[str, np.ndarray]
"""Arrays by their paths."""


class BatchPart(NamedTuple):
    """Which part of a step's batch an outcome is of.

    Attributes:
      number: which of the parts it is.
      needed: how many of them make the update: the first that come.
      weight: how much its gradients, and its loss, weigh among theirs.
      rows: how many rows it has; its model state weighs as much.
    """

    number: int
    needed: int
    weight: float
    rows: float


class Round:
    """The parts of one step that a server has counted.

    Args:
      rules: how values of model state are combined, by path; see `state_reduction`.

    Attributes:
      counted: the numbers of these parts.
      is_complete: whether no other counts.
    """

    def __init__(self, rules: Rules):
        self._rules = rules
        self.counted: set[int] = set()
        self.is_complete = False
        self._weight = 0.0
        self._sums: Leaves = {}  # of gradients: a server may not have the memory for those of many workers
        self._dtypes: dict[str, Any] = {}
        self._value: Any = None
        self._states: list[tuple[BatchPart, Leaves]] = []

    def add(self, part: BatchPart, grads: Leaves, value: np.ndarray | None, model_state: Leaves | None) -> None:
        """Counts a part.

        Args:
          part: which it is.
          grads: its gradients by path.
          value: its loss; None without one.
          model_state: the model state after it by path; None on servers that do not hold it.
        """
        weight = np.float32(part.weight or _LEAST_WEIGHT)
        self._weight += float(weight)
        for name, leaf in grads.items():
            wide = leaf.astype(jnp.promote_types(leaf.dtype, np.float32)) * weight
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide
            self._dtypes[name] = leaf.dtype
        if value is not None:
            self._value = (0.0 if self._value is None else self._value) + weight * value
        if model_state is not None:
            self._states.append((part, model_state))
        self.counted.add(part.number)
        self.is_complete = len(self.counted) == part.needed

    def take_mean(self, before: Leaves | None) -> tuple[Leaves, np.ndarray | None, Leaves | None]:
        """Returns the gradients, the loss and the model state of the parts together, which it then has no longer.

        Args:
          before: the model state before the step.
        """
        weight = np.float32(self._weight)
        grads = {name: (leaf / weight).astype(self._dtypes[name]) for name, leaf in self._sums.items()}
        value = None if self._value is None else np.asarray(self._value / weight)
        after = before if before is None or not self._states else self._joined(before)
        self._sums, self._states = {}, []
        return grads, value, after

    def _joined(self, before: Leaves) -> Leaves:
        ordered = sorted(self._states, key=lambda each: each[0].number)  # whichever came first
        states = [{name: state[name] for name in before} for _, state in ordered]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        changed = [any(not np.array_equal(state[name], before[name]) for state in states) for name in sorted(before)]
        weights: Any = np.array([part.rows for part, _ in ordered], np.float32)
        joined: Leaves = over_parts(before, stacked, changed, self._rules, weights)
        return joined
