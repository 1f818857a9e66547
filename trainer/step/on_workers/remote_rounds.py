"""The train phase of a model with backup workers: all workers compute each batch together, without the slowest."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from trainer.core.train_state import TrainState
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator, RemoteValue
from trainer.metrics import Metric, Sum
from trainer.metrics.base import MetricValue
from trainer.step import steps
from trainer.step.on_workers.remote_phase import RemotePhase
from trainer.step.on_workers.remote_step import PartOutcome, outcome_of_part, train_on_part


class RemoteRounds(RemotePhase):
    """A model's train step in rounds: each worker computes a part of a batch, and the first parts make its update.

    Args:
      *args: see `RemotePhase`.
      has_own_loss: whether code of the user's may add to the loss of `compile`.
    """

    def __init__(self, *args: Any, has_own_loss: bool):
        super().__init__(*args)
        self._has_own_loss = has_own_loss
        self._late: set[RemoteValue] = set()  # parts of steps that are made, at which workers compute still

    def _traced_logs(self, shapes: TrainState, batch: Any) -> Any:
        (*_, logs, _), divisors = jax.eval_shape(
            functools.partial(outcome_of_part, self._user_step, shapes), shapes.params,
            (shapes.step, shapes.model_state, shapes.seed), batch)
        if divisors and self._has_own_loss:
            raise ValueError(
                "`backup_workers` weighs the gradients of a batch's parts by what the loss divides by. That of "
                "`compile` divides by weights, or by the values that a mask keeps, but what the model adds to it, or "
                'makes of it, may not. Use a loss with reduction="sum_over_batch_size" and without `ignore_class`, or '
                "`backup_workers=0`.")
        return logs

    def _own_logs(self) -> dict[str, Any]:
        return {"dropped_rows": _dropped(0.0)}

    def _make_steps(self, coordinator: ClusterCoordinator, batches: Iterable[Any]) -> list[tuple[dict[str, Any], Any]]:
        made: list[tuple[dict[str, Any], Any]] = []
        for batch, arrays in batches:
            made += self._logs_of_round(self._round(coordinator, batch, arrays), steps.rows_of(batch))
            self._next_number += 1
        return made

    def _round(self, coordinator: ClusterCoordinator, batch: Any, arrays: Any) -> list[PartOutcome]:
        """Makes one step; returns the parts that count on server 0. The update is then made on all servers.

        A worker is given one part, as soon as it has ended what it computes for steps before. To give one that has
        ended a second part would keep it from the next step.
        """
        workers, rows = self._cluster.num_workers, steps.rows_of(batch)
        count = min(workers, rows)
        needed = min(workers - self._cluster.backup_workers, count)
        bounds = [rows * number // count for number in range(count + 1)]
        # The last parts are the most likely to come late: another in each step.
        unsent = collections.deque((self._next_number + offset) % count for offset in range(count))
        pending: set[RemoteValue] = set()
        counted: list[PartOutcome] = []
        sent = 0
        while len(counted) < needed:
            while unsent and (sent < needed or sent + len(self._late) < workers):
                number, sent = unsent.popleft(), sent + 1
                part = jax.tree.map(lambda leaf, number=number: leaf[bounds[number]:bounds[number + 1]], batch)
                pending.add(coordinator.schedule(
                    train_on_part, args=(self._step, self._client, self._next_number, number, needed, part, arrays)))
            if not pending and not unsent:
                raise RuntimeError("All parts of a step have come, but the parameter servers have not made its update. "
                                   "A scheduled function must not train a model that `fit` is training.")
            ended = coordinator.wait_for_any(pending | self._late)
            outcomes = [self._outcome(value) for value in pending & ended]
            counted += [outcome for outcome in outcomes if outcome is not None]
            pending, self._late = pending - ended, self._late - ended
        self._late |= pending
        return counted

    def _logs_of_round(self, parts: list[PartOutcome], rows: int) -> list[tuple[dict[str, Any], Any]]:
        """Returns the logs and rows of parts. Scalars weigh as the gradients do, so that the loss is that of all."""
        counted_rows, weight = sum(part.rows for part in parts), sum(part.weight for part in parts)
        dropped = rows - counted_rows
        made = []
        for part in parts:
            scale = part.weight * counted_rows / (weight * part.rows) if weight else 1.0
            logs = {name: value if isinstance(value, MetricValue) else np.float32(value * scale)
                    for name, value in self._logs_of(part.logs).items()}
            made.append(({**logs, "dropped_rows": _dropped(dropped)}, part.rows))
            dropped = 0.0
        return made


def _dropped(rows: float) -> MetricValue:
    counts: list[Any] = [np.float32(rows)]
    return MetricValue(counts, _dropped_rows())


@functools.cache
def _dropped_rows() -> Metric:
    return Sum(name="dropped_rows")
