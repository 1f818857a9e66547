"""NNX objects among the arguments of a function that runs once per replica.

Owns their split into structure and values, and what makes them the same on all replicas again: random streams are each
replica's own while the function runs and keep their keys, and running averages become the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from trainer.core.replica_context import ReplicaContext


def split_objects(objects: Iterable[Any]) -> tuple[ObjectStructure, Any]:
    """Returns the structure of NNX objects, shared variables included, and their values, a tree."""
    graphdef, values = nnx.split(list(objects))
    return ObjectStructure(graphdef), values


@dataclasses.dataclass(frozen=True)
class ObjectStructure:
    """NNX objects without their values. Can be compared and hashed; holds none of the objects.

    Attributes:
      graphdef: what `nnx.split` gave for all of the objects together.
    """

    graphdef: Any

    def open(self, values: Any, context: ReplicaContext) -> list[Any]:
        """Returns new objects for the function to change on this replica."""
        return nnx.merge(self.graphdef, _with_own_streams(values, context))

    def close(self, objects: list[Any], before: Any, average: Callable[[list[Any]], list[Any]]) -> Any:
        """Returns the values that changed objects leave, equal on all replicas.

        Args:
          objects: what `open` returned, once the function has changed them.
          before: the values that `open` was given.
          average: gives the means of arrays over the replicas.

        Raises:
          ValueError: the function changed the structure of an object.
        """
        graphdef, values = nnx.split(objects)
        if graphdef != self.graphdef:
            raise ValueError("The function changed the structure of an NNX object that it was given. Set modes "
                             "such as `train()` before, and keep new attributes out of the step.")
        return _with_equal_statistics(_with_old_streams(values, before), average)

    @staticmethod
    def write(objects: Iterable[Any], values: Any) -> None:
        """Writes values into the user's own objects, those that `split_objects` was given."""
        nnx.update(list(objects), values)


def _with_own_streams(values: Any, context: ReplicaContext) -> Any:
    """Returns values whose random streams are this replica's own: mirrored keys would mean one mask for all."""
    def own(path: Any, variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable
        fold = jax.random.fold_in
        for _ in range(variable[...].ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        return variable.replace(fold(variable[...], context.replica_id_in_sync_group))

    return nnx.map_state(own, values) if jax.tree.leaves(values) else values


def _with_old_streams(new: Any, old: Any) -> Any:
    flat_old = dict(nnx.to_flat_state(old))
    kept = [(path, flat_old[path] if isinstance(variable, nnx.RngKey) else variable)
            for path, variable in nnx.to_flat_state(new)]
    return nnx.from_flat_state(kept)


def _with_equal_statistics(values: Any, average: Callable[[list[Any]], list[Any]]) -> Any:
    """Returns values whose running averages, of each replica's own rows, are the mean over the replicas."""
    flat = list(nnx.to_flat_state(values))
    statistics = [index for index, (_, variable) in enumerate(flat) if isinstance(variable, nnx.BatchStat)]
    means = average([flat[index][1][...] for index in statistics])
    for index, mean in zip(statistics, means, strict=True):
        flat[index] = flat[index][0], flat[index][1].replace(mean)
    return nnx.from_flat_state(flat)
