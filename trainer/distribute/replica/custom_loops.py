"""Execution of a user's function once per replica.

Owns the division of arguments and results into mirrored values (the same on all replicas) and per-replica values. State
objects are mirrored: a TrainState, and NNX modules and optimizers, which are updated in place. Plain arguments are
mirrored too. `nnx_objects.py` handles NNX objects within a replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as nnx_errors
from jax.sharding import PartitionSpec

from trainer.core import errors, replica_context, trace_purity
from trainer.core.ambient.jax_options import jax_config
from trainer.core.compile.jit import compiled
from trainer.core.identity import Identity
from trainer.core.modules.calling.nnx_types import is_nnx_object
from trainer.core.replica_context import MEAN_OVER_ROWS, ReplicaContext
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import restricted
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import free_to_move, retried
from trainer.distribute.replica.gradient_scale import refuse_wrong_scale
from trainer.distribute.replica.per_replica import PerReplica, is_per_replica, rows_of
from trainer.distribute.replica.replicated_state import (
    Replicas,
    is_state,
    leave_replica,
    map_states,
    run_on_replicas,
)
from trainer.distribute.replica.state_reduction import counts, differences, refuse_differences


def _is_argument(value: object) -> bool:
    return is_per_replica(value) or is_state(value) or is_nnx_object(value)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function, the structure of its arguments and NNX objects (None without objects), and its constants by index."""

    function: Callable[..., Any]
    structure: Any
    object_structure: Any
    constants: Mapping[int, Any]

    def __call__(self, context: ReplicaContext, arrays: Mapping[int, Any], object_values: Any) -> tuple[Any, list[Any]]:
        """Returns the outputs of the function, and its NNX objects, for arrays, states and object values."""
        values = {**self.constants, **arrays}
        objects = [] if self.object_structure is None else self.object_structure.open(object_values, context)
        remaining = iter(objects)
        arguments = [values[index] if index in values else next(remaining)
                     for index in range(self.structure.num_leaves)]
        args, kwargs = jax.tree.unflatten(self.structure, arguments)
        with (replica_context.enter(context), trace_purity.given_its_state(self.function),
              trace_purity.side_effects_rejected(self.function)):
            return self.function(*args, **kwargs), objects


@dataclasses.dataclass
class _Program:
    call: _Call
    execute: Any = None
    outputs: PyTree = None  # once traced: the origin of each state in the results, and the tree of the results
    assumes_mean: bool = False  # once traced: whether gradients are applied without an explicit reduction
    is_checked: bool = False  # whether the replicas were checked to agree


class ReplicaRunner:
    """Runs functions on all replicas of a strategy, compiled once per function and argument shapes."""

    def __init__(self, strategy: Replicas):
        self._strategy = strategy
        self._programs: dict[Any, _Program] = {}
        self._scale_is_known: set[Any] = set()  # functions whose gradient scale is checked

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the results of `function(*args, **kwargs)` on each replica; see `Strategy.run`."""
        if not isinstance(args, (tuple, list)):
            raise errors.wrong_type("args", args, "a tuple of the function's arguments, such as `args=(x,)`")
        call, dynamic, objects = self._divided(function, args, kwargs)
        called = _identity(function), call.structure, call.object_structure, tuple(call.constants.items())
        program = self._program((*called, _spec(dynamic)), call, objects)
        with _explained(_name(function)):
            self._check_scale(program, (*called, jax.tree.structure(dynamic[0])), dynamic)
            state_outputs, split_outputs, object_values, differing = retried(program.execute, *dynamic)
        if not program.is_checked:  # only the first time, because it waits for the values
            refuse_differences({path: bool(value) for path, value in jax.device_get(_addressable(differing)).items()})
            program.is_checked = True
        if call.object_structure is not None:
            call.object_structure.write(objects, object_values)
        merged, states = iter(split_outputs), iter(state_outputs)
        origins, structure = program.outputs
        return jax.tree.unflatten(structure, [next(merged) if origin is None else next(states) for origin in origins])

    def _divided(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Call, tuple[Any, Any, Any], list[Any]]:
        """Returns a call, its mirrored and split arguments and the values of its NNX objects, and these objects."""
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_argument)
        mesh = self._strategy.mesh
        constants: dict[int, Any] = {}
        mirrored: dict[int, Any] = {}
        split: dict[int, PerReplica] = {}
        objects: list[Any] = []
        for index, leaf in enumerate(leaves):
            if is_nnx_object(leaf):
                objects.append(leaf)
            elif is_per_replica(leaf):
                split[index] = leaf
            elif isinstance(leaf, (TrainState, jax.Array, np.ndarray, np.generic)):
                mirrored[index] = free_to_move(leaf, mesh)
            else:
                constants[index] = leaf
        object_structure, object_values = _split(objects)
        call = _Call(function, structure, object_structure, constants)
        return call, (mirrored, split, free_to_move(object_values, mesh)), objects

    def _program(self, key: Any, call: _Call, objects: Collection[Any]) -> _Program:
        try:
            program = self._programs.get(key)
        except TypeError:
            unhashable = next(value for value in call.constants.values() if not _is_hashable(value))
            received = type(unhashable).__name__
            raise TypeError("Arguments of a function that runs on replicas are arrays, PerReplica values, state "
                            f"objects, or hashable constants. Received: a value of type {received}.") from None
        if program is None:
            _check_captured(call.function, objects)
            program = self._programs[key] = self._make_program(call)
        return program

    def _check_scale(self, program: _Program, key: Any, dynamic: tuple[Any, Any, Any]) -> None:
        """Raises ValueError if the gradients of a function, checked once, are scaled for another reduction."""
        if self._strategy.replica_count == 1 or key in self._scale_is_known or jax_config.jax_disable_jit:
            return
        if program.outputs is None:
            program.execute.trace(*dynamic)  # `execute` reuses the trace
        call = program.call
        if program.assumes_mean and refuse_wrong_scale(self._strategy, _name(call.function), call, *dynamic):
            self._scale_is_known.add(key)

    def _make_program(self, call: _Call) -> _Program:
        strategy, name, object_structure = self._strategy, _name(call.function), call.object_structure
        program = _Program(call)

        def one_replica(mirrored: Any, split: Any, object_values: Any) -> tuple[Any, Any, Any, Any]:
            here = jax.tree.map(lambda leaf: leaf[0], split)
            rows, row_mask = rows_of(here)
            context = strategy.replica_context(rows, row_mask)
            mirrored = map_states(context.gather_params, mirrored)
            arrays = {**mirrored, **{index: value.stacked for index, value in here.items()}}
            returned, objects = call(context, arrays, object_values)
            program.assumes_mean = context.untold_reductions > 0
            leaves, structure = jax.tree.flatten(returned, is_leaf=is_state)
            origins = [_origin(leaf, mirrored) if is_state(leaf) else None for leaf in leaves]
            program.outputs = origins, structure
            numbers = {index: number for number, index in enumerate(mirrored)}
            states = [(numbers[origin], _left(context, name, mirrored[origin], leaf))
                      for leaf, origin in zip(leaves, origins, strict=True) if origin is not None]
            taken_as_equal: dict[str, jax.Array] = {}
            for leaf, origin in zip(leaves, origins, strict=True):
                if origin is not None:
                    before = mirrored[origin]
                    taken_as_equal |= counts(
                        before.model_state, restricted(leaf.model_state, before.model_state))
            outputs = [_as_output(leaf, rows, row_mask) for leaf in leaves if not is_state(leaf)]
            is_changed = any(_differ(leaf, mirrored[origin]) for leaf, origin in zip(leaves, origins, strict=True)
                             if origin is not None)
            if object_structure is not None:
                new_values, of_objects = object_structure.close(objects, object_values, context)
                taken_as_equal |= of_objects
                is_changed |= _differ(new_values, object_values)
                object_values = new_values
            if is_changed and context.is_padded and context.mask_reads == 0:
                raise _counts_padding(name)
            return states, outputs, object_values, differences(taken_as_equal, context)

        def all_replicas(mirrored: Any, split: Any, object_values: Any) -> tuple[Any, Any, Any, Any]:
            states, (outputs, new_object_values, differing) = run_on_replicas(
                strategy, one_replica, map_states(strategy.on_devices, mirrored), (split, object_values),
                (strategy.rows_spec, PartitionSpec()), (strategy.rows_spec, PartitionSpec(), PartitionSpec()))
            at_rest = [jax.device_put(state, strategy.state_shardings(state)) for state in states]
            return at_rest, outputs, new_object_values, differing

        program.execute = compiled(all_replicas, compiler_options=strategy.compiler_options())
        return program


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Explains errors of JAX in a block that traces or runs the user's function of this name."""
    try:
        yield
    except nnx_errors.TraceContextError as error:
        raise TypeError(f"`{name}` changes an NNX object that it was not given. Pass it as an argument: only NNX "
                        "objects among the arguments are updated.") from error
    except jax.errors.UnexpectedTracerError as error:
        raise TypeError(f"`{name}` keeps a traced value in an object outside of it, or uses one that a function kept "
                        "there before. A function that runs on replicas is compiled: it runs once, to be traced, and "
                        "what it keeps is no value. Return the value instead, and keep what `run` returns; give the "
                        f"object a value again, a metric by `reset_state()`. JAX says: {error}") from error
    except jax.errors.JAXTypeError as error:
        raise TypeError(f"`{name}` turns a traced array into a Python value, with float(), int(), bool(), `if` or "
                        "numpy. A function that runs on replicas is compiled: use jax.numpy, jnp.where or jax.lax.cond "
                        f"in it, and convert what it returns. JAX says: {error}") from error


def _differ(new: PyTree, old: PyTree) -> bool:
    return any(one is not other for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=False))


def _counts_padding(name: str) -> ValueError:
    return ValueError(
        f"`{name}` changes the state by rows that only pad a batch, whose rows do not divide by the replicas. Use "
        f"`model.compute_loss(...)` or an object of `trainer.losses`, which leave them out. Or {MEAN_OVER_ROWS}")


def _split(objects: Collection[Any]) -> tuple[Any, Any]:
    """Returns the `ObjectStructure` and the values of NNX objects; None and no values if there are none."""
    if not objects:
        return None, ()
    # Not at the top: it imports `flax.nnx`, which would take a large part of the trainer's import time.
    from trainer.distribute.replica.nnx_objects import split_objects

    return split_objects(objects)


def _check_captured(function: Callable[..., Any], given: Collection[Any]) -> None:
    """Raises TypeError if a function captures NNX objects that are not arguments: their values would be constants."""
    known = set(map(id, given))
    for name, value in trace_purity.captured(function, is_nnx_object):
        if id(value) not in known and jax.tree.leaves(_split([value])[1]):
            raise TypeError(f"`{_name(function)}` uses `{name}`, an NNX object ({type(value).__name__}), from outside. "
                            "A function that runs on replicas is compiled, and an object that is not among its "
                            "arguments is a constant of the program: later training would not be seen. Pass it as an "
                            "argument of `run`: NNX objects among the arguments are read again in each call, and "
                            "updated.")


def _addressable(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)  # each device has whole arrays


def _as_output(leaf: object, rows: int | None, row_mask: jax.Array | None) -> PerReplica:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
        raise TypeError("A function that runs on replicas returns arrays, or a TrainState. "
                        f"Received: {errors.describe(leaf)}.")
    value = jnp.asarray(leaf)[None]
    has_rows = row_mask is not None and value.ndim > 1 and value.shape[1] == rows
    return PerReplica(value, row_mask[None] if has_rows and row_mask is not None else None)


def _origin(state: TrainState, mirrored: Mapping[int, Any]) -> int:
    """Returns the index of the argument that a state was made from, found by its seed, which no step changes."""
    for index, value in mirrored.items():
        if is_state(value) and value.seed is state.seed:
            return index
    raise ValueError("A function that runs on replicas returned a TrainState that is not made of one that it was "
                     "given. Pass the state as an argument, and return what its `replace` or `apply_gradients` gives.")


def _left(context: ReplicaContext, name: str, before: TrainState, after: TrainState) -> TrainState:
    if after.step is not before.step:
        after = after.replace(step=before.step + 1)  # one step, regardless of the number of applied gradients
    return leave_replica(context, name, before, after)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _spec(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def _identity(function: Any) -> Any:
    """Returns a key shared by equal functions, with the same code, defaults and captured values."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or hasattr(function, "__self__"):
        return function
    return code, function.__defaults__, tuple(Identity(cell.cell_contents) for cell in closure or ())


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
