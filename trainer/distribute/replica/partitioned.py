"""The context of a step that XLA divides over the replicas.

Owns the way from there to code that runs once per replica. To all other code such a step is that of one replica, which
has the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from trainer.core import replica_context
from trainer.core.replica_context import ReplicaContext
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import REPLICA_AXIS
from trainer.distribute.replica.replicated_state import StateStrategy


class PartitionedContext(ReplicaContext):
    """The context of one replica that has all rows of a batch, in a program that XLA divides by them.

    Args:
      strategy: the strategy over whose devices it is divided.
      rows: the rows of the batch.
    """

    has_whole_batch = True

    def __init__(self, strategy: StateStrategy, rows: int):
        super().__init__(rows)
        self._strategy = strategy
        replicas = strategy.mesh.shape[REPLICA_AXIS]
        self.batch_norm_groups = replicas if rows % replicas == 0 else 1

    def with_rows_in_place(self, tree: PyTree) -> Any:
        return self._strategy.with_rows_in_place(tree)

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        return rule.update(self._strategy.with_gradients_in_place(grads), opt_state, params, extra)

    def map_over_rows(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        replicas = self._strategy.mesh.shape[REPLICA_AXIS]
        if replicas == 1 or not self.rows or self.rows % replicas:
            return function(*args, **kwargs)
        rows_spec = self._strategy.rows_spec
        given, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [place for place, leaf in enumerate(given) if isinstance(leaf, (jax.Array, np.ndarray))]
        first_of_kwargs = len(jax.tree.leaves(tuple(args)))
        specs = [rows_spec if place < first_of_kwargs and given[place].shape[:1] == (self.rows,) else PartitionSpec()
                 for place in places]
        context = ReplicaContext(self.rows // replicas)

        def on_replica(arrays: list[jax.Array]) -> Any:
            leaves = list(given)
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            args, kwargs = jax.tree.unflatten(structure, leaves)
            with replica_context.enter(context):
                return function(*args, **kwargs)

        # What the compiler cannot divide over the replicas, it cannot divide over the devices of one.
        mapped = self._strategy.map_over_replicas(
            on_replica, (specs,), lambda outputs: jax.tree.map(lambda leaf: rows_spec, outputs),
            divides_replicas=False)
        return mapped([given[place] for place in places])
