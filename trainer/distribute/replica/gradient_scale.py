"""Check that gradients applied on replicas are scaled for their reduction.

A loss divided by the rows of the whole batch requires the sum of its gradients over replicas; a mean over a replica's
rows requires their mean. The wrong reduction silently changes training by the factor N. Owns the comparison with the
gradients of a single replica with the whole batch. The check is best effort. It stays silent where it cannot tell, as
for a function that draws random numbers or is written for a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trainer.core.ambient import state as ambient
from trainer.core.compile.constraints import constraints_by, ignore
from trainer.core.compile.jit import compile_lowered, compiled
from trainer.core.errors import see
from trainer.core.replica_context import ReplicaContext, get_replica_context
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import to_host
from trainer.distribute.replica.partitioned import PartitionedContext
from trainer.distribute.replica.per_replica import PerReplica, rows_of
from trainer.distribute.replica.replicated_state import Replicas, map_states, run_on_replicas
from trainer.optimizers.named import NamedRules
from trainer.optimizers.update_rule import UpdateRule

TOLERANCE = 1e-2  # relative to the norm of a parameter's gradients: half precision sums other groups of rows
NOISE = 1e-2  # relative to the norm of all: smaller gradients may be rounding, as for a bias before a normalization

Call = Callable[[ReplicaContext, Mapping[int, Any], Any], Any]
"""Calls a function in a context, with its arrays and states by index and the values of NNX objects."""


class _Applied(NamedTuple):
    """Gradients, as they reached the update of a module (None without names), applied without an explicit reduction."""

    module: str | None
    grads: PyTree


class _Recorder(UpdateRule):
    """An update rule that appends gradients to `applied` in place of the update of `rule`."""

    def __init__(self, rule: UpdateRule, module: str | None, applied: list[_Applied]):
        vars(self).update(vars(rule))
        self._module, self._applied = module, applied

    def update(self, grads: PyTree, state: Any, params: PyTree, extra: Any = None) -> tuple[Any, Any]:
        if not get_replica_context().is_told_reduction:
            self._applied.append(_Applied(self._module, grads))
        return params, state


def refuse_wrong_scale(
    strategy: Replicas, name: str, call: Call, mirrored: Mapping[int, Any], split: Mapping[int, PerReplica],
    object_values: Any,
) -> bool:
    """Raises ValueError if all gradients of a call are 1/N or N times the gradients of the whole batch on one replica.

    The function is traced and run on the replicas and on the whole batch, both without an update. It must have been
    traced before, so that it has no errors of its own.

    Args:
      strategy: the strategy, of N replicas.
      name: the function's name.
      call: calls the function.
      mirrored: arguments that are equal on all replicas, by index.
      split: arguments that differ between replicas, by index.
      object_values: the values of the NNX objects among the arguments.

    Returns:
      Whether the batch is conclusive; a batch whose rows are all on a single replica is not.
    """
    replicas = strategy.replica_count
    with jax.transfer_guard("allow"):  # guards are meant for loops, and this runs once
        try:
            masks = [None if value.row_mask is None else to_host(value.row_mask) for value in split.values()]
            if any(mask is not None and mask.any(1).sum() == 1 for mask in masks):
                return False
            rows = [None if mask is None else np.flatnonzero(mask) for mask in masks]
            found = _compare(strategy, call, dict(zip(split, rows, strict=True)), mirrored, split, object_values)
        except Exception:  # any error of a function that is written for a replica's rows, or needs too much memory
            return True
    for module, (is_part, is_multiple) in found:
        if is_part or is_multiple:
            raise _wrong_scale(name, module, replicas, is_part)
    return True


def _compare(
    strategy: Replicas, call: Call, real_rows: Mapping[int, Any], mirrored: Mapping[int, Any],
    split: Mapping[int, PerReplica], object_values: Any,
) -> list[tuple[str | None, Any]]:
    """Returns, by module, whether gradients are 1/N, and whether N times, the gradients of the whole batch."""
    if not split or any(value.stacked.ndim < 2 for value in split.values()):
        return []  # no rows
    replicas = strategy.replica_count
    modules: list[str | None] = []

    def on_replica(mirrored: Any, split: Any, object_values: Any) -> Any:
        here = jax.tree.map(lambda leaf: leaf[0], split)
        context = strategy.replica_context(*rows_of(here))
        arrays = {index: value.stacked for index, value in here.items()}
        applied = _applied(call, context, map_states(context.gather_params, mirrored), arrays, object_values)
        modules[:] = [each.module for each in applied]
        return [], [each.grads for each in applied]

    def compare(mirrored: Any, split: Any, object_values: Any) -> Any:
        mirrored = map_states(strategy.on_devices, mirrored)
        _, (reduced,) = run_on_replicas(strategy, on_replica, mirrored, (split, object_values),
                                        (strategy.rows_spec, PartitionSpec()), (PartitionSpec(),))
        if not reduced:
            return []
        whole = {index: _joined(value.stacked, real_rows[index]) for index, value in split.items()}
        context = PartitionedContext(strategy, len(next(iter(whole.values()))))
        with ambient.replaced(strategy=strategy), constraints_by(ignore):
            applied = _applied(call, context, mirrored, whole, object_values)
        if [each.module for each in applied] != modules:
            return []
        return [(_are_multiples(grads, each.grads, 1 / replicas), _are_multiples(grads, each.grads, replicas))
                for grads, each in zip(reduced, applied, strict=True)]

    traced = compiled(compare, NamedSharding(strategy.mesh, PartitionSpec())).trace(mirrored, split, object_values)
    if traced.jaxpr.effects or not traced.jaxpr.out_avals:
        return []  # side effects must not be repeated
    program = compile_lowered(traced.lower(), strategy.compiler_options())
    verdicts = jax.tree.map(lambda leaf: bool(leaf.addressable_data(0)), program(mirrored, split, object_values))
    return list(zip(modules, verdicts, strict=True))


def _applied(
    call: Call, context: ReplicaContext, mirrored: Any, split: Mapping[int, jax.Array], object_values: Any
) -> list[_Applied]:
    """Returns the gradients that a function applies in a context, in order; its parameters stay unchanged."""
    applied: list[_Applied] = []

    def recording(state: TrainState) -> TrainState:
        rules = state.optimizer
        if isinstance(rules, NamedRules):
            return state.replace(optimizer=NamedRules(
                {name: _Recorder(rule, name, applied) for name, rule in rules.items()}))
        return state if rules is None else state.replace(optimizer=_Recorder(rules, None, applied))

    call(context, {**map_states(recording, mirrored), **split}, object_values)
    return applied


def _joined(stacked: jax.Array, real_rows: Any) -> jax.Array:
    joined = stacked.reshape(-1, *stacked.shape[2:])
    return joined if real_rows is None else joined[real_rows]


def _are_multiples(grads: PyTree, others: PyTree, factor: float) -> jax.Array:
    """Returns whether all gradients, up to rounding, equal the others times a factor, and are not all zero."""
    pairs = [(jnp.asarray(one, jnp.float32), factor * jnp.asarray(other, jnp.float32))
             for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True)]
    total = _norm([other for _, other in pairs])
    are_multiples = [
        (_norm([one - other]) <= TOLERANCE * _norm([other])) | (_norm([one]) + _norm([other]) <= NOISE * total)
        for one, other in pairs]
    return jnp.all(jnp.array(are_multiples)) & (total > 0) & jnp.isfinite(total)


def _norm(arrays: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum((jnp.square(array).sum() for array in arrays), jnp.float32(0)))


def _wrong_scale(name: str, module: str | None, replicas: int, is_part: bool) -> ValueError:
    described, given = ("gradients", "grads") if module is None else (f"gradients of {module!r}", f"{module}=grads")
    if is_part:
        return ValueError(
            f"`{name}` applies {described} that are 1/{replicas} of those of the whole batch on one device, because "
            "`apply_gradients` takes the mean over the replicas. If the loss is divided by the rows of the whole "
            "batch, or by the number of replicas, write "
            f"`state.apply_gradients({given}, reduce=\"sum\")`. If it is divided by a fixed number of rows that each "
            f"replica has, the mean is right: write `reduce=\"mean\"`. {see('gradient-scale')}")
    return ValueError(
        f"`{name}` applies {described} that are {replicas} times those of the whole batch on one device: they are "
        "summed over the replicas, or multiplied by their number, before `apply_gradients` takes the mean. Leave that "
        "out. If such a sum is divided by a fixed number of replicas, it is right: write `reduce=\"mean\"`. "
        f"{see('gradient-scale')}")
