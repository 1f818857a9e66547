"""Context of a step that XLA partitions over the replicas.

Owns the transition to code that runs once per replica. All other code sees a single replica with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from trainer.core import errors, replica_context
from trainer.core.compile.traces.row_mixing import certain_mixing
from trainer.core.replica_context import ReduceOp, ReplicaContext
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.distribute.replica.replicated_state import Replicas


class PartitionedContext(ReplicaContext):
    """The context of a single replica with all `rows` of a batch, in a program that XLA partitions by rows."""

    has_whole_batch = True

    def __init__(self, strategy: Replicas, rows: int):
        super().__init__(rows)
        self._strategy = strategy
        self._layouts: Mapping[str, PartitionSpec] = {}
        self.batch_norm_groups = strategy.replica_count if rows % strategy.replica_count == 0 else 1

    def with_rows_in_place(self, tree: PyTree) -> Any:
        return self._strategy.with_rows_in_place(tree)

    def gather_params(self, state: TrainState) -> TrainState:
        self._layouts = self._strategy.layouts(state)
        return self._strategy.with_params_in_place(state)

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        return self._strategy.with_gradients_in_place(grads, self._layouts)

    def map_over_rows(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        given, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [place for place, leaf in enumerate(given) if isinstance(leaf, (jax.Array, np.ndarray))]
        first_of_kwargs = len(jax.tree.leaves(tuple(args)))
        has_rows = [place < first_of_kwargs and given[place].ndim > 0 for place in places]
        _check_is_per_row(function, given, structure, dict(zip(places, has_rows, strict=True)), self.rows)
        replicas = self._strategy.replica_count
        if replicas == 1 or not self.rows or self.rows % replicas:
            return function(*args, **kwargs)
        rows_spec = self._strategy.rows_spec
        specs = [rows_spec if is_split else PartitionSpec() for is_split in has_rows]
        context = ReplicaContext(self.rows // replicas)

        def on_replica(arrays: list[jax.Array]) -> Any:
            leaves = list(given)
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            args, kwargs = jax.tree.unflatten(structure, leaves)
            with replica_context.enter(context):
                return function(*args, **kwargs)

        # The compiler cannot divide this code over the replicas, nor over the devices of a replica.
        mapped = self._strategy.map_over_replicas(
            on_replica, (specs,), lambda outputs: jax.tree.map(lambda leaf: rows_spec, outputs),
            divides_replicas=False)
        try:
            return mapped([given[place] for place in places])
        except Exception as error:
            if any(given[place].shape[:1] == (self.rows,) for place in places if place >= first_of_kwargs):
                error.add_note("A keyword argument of `on_each_replica` has the rows of the batch. Keyword arguments "
                               "are whole on each replica: pass rows by position.")
            raise


def _check_is_per_row(
    function: Callable[..., Any], given: Sequence[Any], structure: Any, has_rows: Mapping[int, bool], rows: int | None
) -> None:
    """Raises ValueError if arguments to split are not rows of the batch, or if `function` certainly combines rows."""
    name = getattr(function, "__name__", type(function).__name__)
    wrong = [given[place] for place, is_split in has_rows.items() if is_split and given[place].shape[0] != rows]
    if wrong:
        raise ValueError(
            f"`{name}` runs on each replica: its positional arguments hold rows of the batch, arrays of shape ({rows}, "
            f"...). Received: {errors.describe(wrong[0])}. Pass what is whole on each replica by keyword.")
    split = {place: given[place] for place, is_split in has_rows.items() if is_split}
    whole = {place: given[place] for place, is_split in has_rows.items() if not is_split}

    def call(split: Mapping[int, Any], whole: Mapping[int, Any]) -> Any:
        arrays = {**split, **whole}
        args, kwargs = jax.tree.unflatten(structure, [arrays.get(place, leaf) for place, leaf in enumerate(given)])
        with replica_context.enter(ReplicaContext()):
            return function(*args, **kwargs)

    if split and (because := certain_mixing(call, split, whole)) is not None:
        raise ValueError(
            f"`{name}` runs on each replica, and must compute each row from that row alone: {because}. Compute it "
            "outside and pass it: rows by position, such as a key or a mask for each, and the rest by keyword.")
