"""Running a user's function once per replica.

Owns which arguments and results are mirrored (the same on all replicas) and which are per-replica. State objects are
mirrored: a TrainState, and NNX modules and optimizers, which are updated in place. So are plain arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from trainer import errors, replica
from trainer.compiled_step import compiled_over_mesh
from trainer.distribute.per_replica import PerReplica, is_per_replica
from trainer.replica import ReplicaContext
from trainer.state import TrainState


class RunStrategy(Protocol):
    """What running a function needs of a strategy."""

    mesh: Mesh

    @property
    def mask_spec(self) -> PartitionSpec:
        """How the leading axis is split over the replicas."""

    @property
    def state_spec(self) -> PartitionSpec:
        """How a replica sees the state."""

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the replica being traced."""


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def _is_argument(value: Any) -> bool:
    return is_per_replica(value) or isinstance(value, TrainState) or _is_object(value)


@dataclasses.dataclass
class _Program:
    execute: Any
    outputs: Any = None  # the tree of the results, known once traced


class ReplicaRunner:
    """Runs functions on all replicas of a strategy, compiled once per function and shapes of arguments.

    Args:
      strategy: the mesh and the context of its replicas.
    """

    def __init__(self, strategy: RunStrategy):
        self._strategy = strategy
        self._programs: dict[Any, _Program] = {}

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `function(*args, **kwargs)` returns on each replica; see `Strategy.run`."""
        leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_argument)
        objects = [leaf for leaf in leaves if _is_object(leaf)]
        graphdef, object_state = nnx.split(objects)
        split = {index: leaf for index, leaf in enumerate(leaves) if is_per_replica(leaf)}
        constants: dict[int, Any] = {}
        mirrored: dict[int, Any] = {}
        for index, leaf in enumerate(leaves):
            if index in split or _is_object(leaf):
                continue
            is_data = isinstance(leaf, (TrainState, jax.Array, np.ndarray, np.generic))
            (mirrored if is_data else constants)[index] = leaf
        dynamic = (mirrored, split, object_state)
        key = (_identity(function), treedef, graphdef, tuple(constants.items()), _spec(dynamic))
        try:
            program = self._programs.get(key)
        except TypeError:
            unhashable = next(value for value in constants.values() if not _is_hashable(value))
            received = type(unhashable).__name__
            raise TypeError("Arguments of a function that runs on replicas are arrays, PerReplica values, state "
                            f"objects, or hashable constants. Received: a value of type {received}.") from None
        if program is None:
            program = self._programs[key] = self._make_program(function, treedef, graphdef, constants)
        try:
            state_outputs, split_outputs, new_object_state = program.execute(*dynamic)
        except jax.errors.JAXTypeError as error:
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(f"`{name}` turns a traced array into a Python value, with float(), int(), bool(), `if` or "
                            "numpy. A function that runs on replicas is compiled: use jax.numpy, jnp.where or "
                            f"jax.lax.cond in it, and convert what it returns. JAX says: {error}") from error
        if objects:
            nnx.update(objects, new_object_state)
        merged = iter(split_outputs)
        states = iter(state_outputs)
        flags, structure = program.outputs
        return jax.tree.unflatten(structure, [next(states) if is_state else next(merged) for is_state in flags])

    def _make_program(self, function: Any, treedef: Any, graphdef: Any, constants: Mapping[int, Any]) -> _Program:
        strategy = self._strategy

        def one_replica(mirrored: Any, split: Any, object_state: Any) -> tuple[Any, Any, Any]:
            here = jax.tree.map(lambda leaf: leaf[0], split)
            rows, row_mask = _rows(here)
            context = strategy.replica_context(rows, row_mask)
            values = {**constants, **mirrored, **{index: value.stacked for index, value in here.items()}}
            objects = nnx.merge(graphdef, _with_own_streams(object_state, context))
            remaining = iter(objects)
            arguments = [values[index] if index in values else next(remaining) for index in range(treedef.num_leaves)]
            args, kwargs = jax.tree.unflatten(treedef, arguments)
            with replica.enter(context):
                returned = function(*args, **kwargs)
            leaves, structure = jax.tree.flatten(returned, is_leaf=lambda leaf: isinstance(leaf, TrainState))
            program.outputs = [isinstance(leaf, TrainState) for leaf in leaves], structure
            states = [_advanced(leaf, mirrored) for leaf in leaves if isinstance(leaf, TrainState)]
            outputs = [_as_output(leaf, rows, row_mask) for leaf in leaves if not isinstance(leaf, TrainState)]
            new_graphdef, new_state = nnx.split(objects)
            if new_graphdef != graphdef:
                raise ValueError("The function changed the structure of an NNX object that it was given. Set modes "
                                 "such as `train()` before, and keep new attributes out of the step.")
            return states, outputs, _with_old_streams(new_state, object_state)

        program = _Program(None)
        program.execute = compiled_over_mesh(
            one_replica, strategy.mesh,
            in_specs=(strategy.state_spec, strategy.mask_spec, PartitionSpec()),
            out_specs=(strategy.state_spec, strategy.mask_spec, PartitionSpec()))
        return program


def _rows(values: Mapping[int, PerReplica]) -> tuple[int | None, jax.Array | None]:
    """Returns this replica's number of rows and their mask, from the first value that has rows."""
    for value in jax.tree.leaves(values, is_leaf=is_per_replica):
        if value.row_mask is not None:
            return value.row_mask.shape[0], value.row_mask
    shapes = [value.stacked.shape for value in jax.tree.leaves(values, is_leaf=is_per_replica)]
    return next((shape[0] for shape in shapes if shape), None), None


def _as_output(leaf: Any, rows: int | None, row_mask: jax.Array | None) -> PerReplica:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
        raise TypeError("A function that runs on replicas returns arrays, or a TrainState. "
                        f"Received: {errors.describe(leaf)}.")
    value = jnp.asarray(leaf)[None]
    has_rows = row_mask is not None and value.ndim > 1 and value.shape[1] == rows
    return PerReplica(value, row_mask[None] if has_rows and row_mask is not None else None)


def _advanced(state: TrainState, mirrored: Mapping[int, Any]) -> TrainState:
    # One step, however often gradients were applied in it.
    before = next((value for value in mirrored.values() if isinstance(value, TrainState)), None)
    return state if before is None or state.step is before.step else state.replace(step=before.step + 1)


def _with_own_streams(state: Any, context: ReplicaContext) -> Any:
    """Returns an NNX state whose random streams are this replica's own: mirrored keys would mean one mask for all."""
    def own(path: Any, variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable
        fold = jax.random.fold_in
        for _ in range(variable[...].ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        return variable.replace(fold(variable[...], context.replica_id_in_sync_group))

    return nnx.map_state(own, state) if jax.tree.leaves(state) else state


def _with_old_streams(new: Any, old: Any) -> Any:
    flat_old = dict(nnx.to_flat_state(old))
    kept = [(path, flat_old[path] if isinstance(variable, nnx.RngKey) else variable)
            for path, variable in nnx.to_flat_state(new)]
    return nnx.from_flat_state(kept)


def _spec(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def _identity(function: Any) -> Any:
    """Returns a key that two functions share if they are one, or have the same code, defaults and captured values."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or hasattr(function, "__self__"):
        return function
    return code, function.__defaults__, tuple(_Same(cell.cell_contents) for cell in closure or ())


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """Compares a captured value by identity, and keeps it alive so that its identity stays its own."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
