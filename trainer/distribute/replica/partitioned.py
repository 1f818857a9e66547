"""The context of a step that sees the whole batch, in one program that XLA divides over the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.core.replica_context import ReplicaContext
from trainer.core.types import PyTree

if TYPE_CHECKING:
    from trainer.distribute.strategies.strategy import Strategy


class PartitionedContext(ReplicaContext):
    """The context of a single replica, whose program XLA divides over a strategy's devices.

    Args:
      strategy: the strategy.
      rows: the rows of the batch.
    """

    def __init__(self, strategy: Strategy, rows: int):
        super().__init__(rows)
        self._strategy = strategy
        replicas = strategy.num_replicas_in_sync
        self.batch_norm_groups = replicas if rows % replicas == 0 else 1

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        return rule.update(self._strategy.with_gradients_in_place(grads), opt_state, params, extra)
