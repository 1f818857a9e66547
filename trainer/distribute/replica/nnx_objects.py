"""NNX objects among the arguments of a function that runs once per replica.

Owns their split into structure and values, the groups of rows that their BatchNorm normalizes by, and their
synchronization. Random streams differ between replicas while the function runs, and their keys are restored. Model
state follows `replicated_state.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from trainer.core.modules.nnx_batch_norm import replace_nnx_batch_norms, restore_nnx_batch_norms, set_nnx_policy
from trainer.core.replica_context import ReplicaContext
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import PyTree
from trainer.distribute.replica.state_reduction import counts, over_replicas


def split_objects(objects: Iterable[Any]) -> tuple[ObjectStructure, Any]:
    """Returns the structure of NNX objects, including shared variables, and the tree of their values."""
    graphdef, values = nnx.split(list(objects))
    return ObjectStructure(graphdef), values


@dataclasses.dataclass(frozen=True)
class ObjectStructure:
    """NNX objects without their values, as a `graphdef` of all of them; hashable, without references to the objects."""

    graphdef: Any

    def open(self, values: PyTree, context: ReplicaContext) -> list[Any]:
        """Returns new objects for the function to change on this replica; their BatchNorm uses the whole batch.

        Raises:
          ValueError: if the state of an object cannot be merged from several replicas.
        """
        objects = nnx.merge(self.graphdef, _with_own_streams(values, context))
        for each in objects:
            _check_can_be_merged(each, context)
            replace_nnx_batch_norms(each)
            set_nnx_policy(each, "global", ())
        return objects

    def close(self, objects: list[Any], before: PyTree, context: ReplicaContext) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the values of changed objects, equal on all replicas, and the values that are assumed to be equal.

        Args:
          objects: the objects from `open`, after the function has changed them.
          before: the values that `open` received.
          context: the replica's context.

        Raises:
          ValueError: if the function changed the structure of an object.
        """
        for each in objects:
            restore_nnx_batch_norms(each)
        graphdef, values = nnx.split(objects)
        if graphdef != self.graphdef:
            raise ValueError("The function changed the structure of an NNX object that it was given. Set modes "
                             "such as `train()` before, and keep new attributes out of the step.")
        return _with_merged_state(_with_old_streams(values, before), before, context)

    @staticmethod
    def write(objects: Iterable[Any], values: PyTree) -> None:
        """Writes values into the user's own objects, which were given to `split_objects`."""
        nnx.update(list(objects), values)


def _check_can_be_merged(value: Any, context: ReplicaContext) -> None:
    if context.num_replicas_in_sync > 1 and any(
            isinstance(node, nnx.metrics.Welford) for _, node in nnx.iter_graph(value)):
        raise ValueError(
            "`nnx.metrics.Welford` cannot be updated by several replicas: the spread of all rows is not a mean of "
            "theirs. Return the values from the function, and update it with `strategy.gather(values, axis=0)`.")


def _with_own_streams(values: PyTree, context: ReplicaContext) -> Any:
    """Returns values with this replica's own random streams; mirrored keys would give all replicas equal masks."""
    def own(path: Any, variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(variable.get_value())  # a new variable, because objects would write into this one
        fold = jax.random.fold_in
        for _ in range(variable[...].ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        return variable.replace(fold(variable[...], context.replica_id_in_sync_group))

    return nnx.map_state(own, values) if jax.tree.leaves(values) else values


def _with_old_streams(new: PyTree, old: PyTree) -> Any:
    flat_old = dict(nnx.to_flat_state(old))
    kept = [(path, flat_old[path] if isinstance(variable, nnx.RngKey) else variable)
            for path, variable in nnx.to_flat_state(new)]
    return nnx.from_flat_state(kept)


def _with_merged_state(new: PyTree, old: PyTree, context: ReplicaContext) -> tuple[Any, dict[str, jax.Array]]:
    """Returns values whose model state (all but parameters, optimizer state and streams) is equal on all replicas."""
    flat_old = dict(nnx.to_flat_state(old))
    state = {SEPARATOR.join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(new)
             if not isinstance(variable, (nnx.Param, nnx.OptState, nnx.RngState))}
    before = {name: flat_old[path].get_value() for name, (path, _) in state.items()}
    after = {name: variable.get_value() for name, (_, variable) in state.items()}
    values = over_replicas(before, after, context)
    merged = {path: variable.replace(values[name]) for name, (path, variable) in state.items()}
    return (nnx.from_flat_state([(path, merged.get(path, variable)) for path, variable in nnx.to_flat_state(new)]),
            counts(before, after))
