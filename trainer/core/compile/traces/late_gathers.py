"""Parameters that are gathered again for each use, so that no device holds all of them at once.

Owns the rewrite of a traced step that gathers split parameters at its start: a gathered array would live until its last
use, in the backward pass. In the rewritten program each operation gathers its own operands, at most a few uses ahead.
The results stay the same, for any code of a step. PyTorch's FSDP also frees whole parameters after each use (Zhao et
al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from trainer.core.compile.jit import on_each_part
from trainer.core.compile.traces.equations import CALLS, REMATERIALISED, jaxpr_of, program_of, run, scan_counts

# Smaller arrays are gathered at the start, many in one collective, and stay: together they have few bytes.
LEAST_BYTES = 2**20
# Number of uses ahead of its own that a gather may begin, to overlap with their arithmetic.
USES_AHEAD = 2
_MUCH_LARGER = 8  # such as gradients of a language model's logits
_ELEMENTWISE = ("convert_element_type", "copy")
_OF_THE_SAME_VALUES = (*_ELEMENTWISE, "reshape", "transpose", "squeeze", "broadcast_in_dim", "expand_dims")


def with_late_gathers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an equal function that gathers shards again for each use of the whole array.

    Args:
      function: a pure function of trees of arrays, which gathers arrays of the first tree by a tiled
        `jax.lax.all_gather`, alone or on its own in a function of `jit.on_each_part`. It is traced when the returned
        function is called.
    """

    def call(*args: Any) -> Any:
        program, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        rewriter = _Rewriter(leaves[:len(jax.tree.leaves(args[0]))])
        values = [rewriter.whole(value) for value in rewriter.run(program, leaves)]
        return jax.tree.unflatten(jax.tree.structure(outputs), values)

    return call


@dataclasses.dataclass(frozen=True)
class _Late:
    """An array that is gathered where it is used, followed by the equations `then`; `part` is this replica's shard.

    If the devices of a replica split it over mesh axes, these are `inner_axes`, and `layout` says how.
    """

    part: Any
    gathering: Any
    axis: int
    inner_axes: frozenset[str] = frozenset()
    layout: tuple[Any, ...] = ()
    then: tuple[Any, ...] = ()

    def made(self, part: jax.Array) -> Any:
        """Returns the array, gathered from `part`."""
        def gathered(part: jax.Array) -> Any:
            value, = _run(self.gathering, [part], all_gather_dimension=self.axis)
            return value

        gather = on_each_part(gathered, self.inner_axes, PartitionSpec(*self.layout)) if self.inner_axes else gathered
        value = gather(part)
        for equation in self.then:
            value, = _run(equation, [value])
        return value

    def followed_by(self, equation: JaxprEqn) -> _Late:
        """Returns the result of an equation on the array."""
        return dataclasses.replace(self, then=(*self.then, equation))

    @property
    def can_be_sliced(self) -> bool:
        """Whether slices along the first axis can be gathered on their own."""
        is_split = any(self.layout[:1])
        return self.axis > 0 and not is_split and all(equation.primitive.name in _ELEMENTWISE for equation in self.then)

    def of_slice(self, part: jax.Array) -> _Late:
        """Returns a slice along the first axis, from the slice of the shard."""
        return dataclasses.replace(self, part=part, axis=self.axis - 1, layout=self.layout[1:])

    def of_stack(self, part: jax.Array) -> _Late:
        """Returns the stack of such slices, from the shard of the stack."""
        layout = (None, *self.layout) if self.layout else ()
        return dataclasses.replace(self, part=part, axis=self.axis + 1, layout=layout)


class _Rewriter:
    """Runs a program in a trace, and defers the gathers of `parts`."""

    def __init__(self, parts: Sequence[Any] = ()):
        self._parts = {id(part): part for part in parts}
        self._uses: collections.deque[Any] = collections.deque(maxlen=USES_AHEAD)  # an array for each of the last uses

    def run(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a `ClosedJaxpr` for arrays and `_Late` arrays."""
        jaxpr = jaxpr_of(program)
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            values.update(zip(equation.outvars, self._found(equation, list(map(value_of, equation.invars))),
                              strict=True))
        return list(map(value_of, jaxpr.outvars))

    def _found(self, equation: JaxprEqn, read: list[Any]) -> Sequence[Any]:
        name, are_late = equation.primitive.name, [isinstance(value, _Late) for value in read]
        if name in CALLS and (any(are_late) or any(id(value) in self._parts for value in read)):
            return self.run(program_of(equation), read)
        if len(read) == 1 and id(read[0]) in self._parts and (gathered := _gathered(equation, read[0])) is not None:
            return [gathered]
        if not any(are_late):
            return _run(equation, read)
        if name in _OF_THE_SAME_VALUES and len(read) == 1:
            return [read[0].followed_by(equation)]
        if name in REMATERIALISED:
            return self._rematerialised(equation, read)
        if name == "scan":
            return self._scanned(equation, read)
        found = _run(equation, list(map(self.whole, read)))
        self._note_use(read, found)
        return found

    def _rematerialised(self, equation: JaxprEqn, read: list[Any]) -> Sequence[Any]:
        """Runs the recomputation of a backward pass, after all of its inputs, as JAX does."""
        if equation.params["differentiated"] and equation.params["prevent_cse"]:
            held = lax.optimization_barrier([value.part if isinstance(value, _Late) else value for value in read])
            read = [dataclasses.replace(value, part=new) if isinstance(value, _Late) else new
                    for value, new in zip(read, held, strict=True)]
        return self.run(program_of(equation), read)

    def _scanned(self, equation: JaxprEqn, read: list[Any]) -> Sequence[Any]:
        """Runs a loop in which each iteration gathers its slices of the stacked arrays."""
        consts, carried = scan_counts(equation)
        first = consts + carried
        sliced = {index: value for index, value in enumerate(read)
                  if index >= first and isinstance(value, _Late) and value.can_be_sliced}
        whole = [value.part if index in sliced else self.whole(value) for index, value in enumerate(read)]
        same: dict[int, _Late] = {}  # outputs that are unchanged input stacks, as a backward pass needs them

        def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            args = [*whole[:consts], *carry, *slices]
            rewriter = _Rewriter()
            returned = rewriter.run(program_of(equation), [
                sliced[index].of_slice(arg) if index in sliced else arg for index, arg in enumerate(args)])
            for number, value in enumerate(returned):
                if number >= carried and isinstance(value, _Late):
                    index, = (index for index in sliced if args[index] is value.part)
                    stack = value.of_stack(whole[index])
                    if stack.can_be_sliced:
                        same[number] = stack
            results = [None if number in same else rewriter.whole(value) for number, value in enumerate(returned)]
            return results[:carried], results[carried:]

        carry, stacked = lax.scan(turn, whole[consts:first], whole[first:], equation.params["length"],
                                  equation.params["reverse"], equation.params["unroll"])
        found = [same.get(number, value) for number, value in enumerate([*carry, *stacked])]
        self._note_use(read, found)
        return found

    def whole(self, value: Any) -> Any:
        """Returns the whole array, for an operation that needs it."""
        if not isinstance(value, _Late):
            return value
        if len(self._uses) < USES_AHEAD:
            return value.made(value.part)
        return value.made(_after(self._uses[0], value.part))

    def _note_use(self, read: Sequence[Any], found: Sequence[Any]) -> None:
        """Records an array that marks the begin or end of a use; later operations keep it in memory."""
        begun, ended = map(_smallest_of_floats, (read, found))
        if begun is not None and (ended is None or begun.size <= _MUCH_LARGER * ended.size):
            self._uses.append(begun)
        elif ended is not None:
            self._uses.append(ended)


def _gathered(equation: Any, part: Any) -> _Late | None:
    """Returns the result of an equation that only gathers a large array; None for other equations."""
    params, gathering = equation.params, equation
    if is_mapped := equation.primitive.name == "shard_map":
        equations = jaxpr_of(params["jaxpr"]).eqns
        gathering = equations[0] if len(equations) == 1 else equation
    if gathering.primitive.name != "all_gather" or not gathering.params["tiled"] or (
            _nbytes(equation.outvars[0].aval) < LEAST_BYTES):
        return None
    inner = (frozenset(params["newly_manual_axes"]), tuple(params["in_specs"][0])) if is_mapped else ()
    return _Late(part, gathering, gathering.params["all_gather_dimension"], *inner)


def _smallest_of_floats(values: Sequence[Any]) -> Any:
    floats = [value for value in values if isinstance(value, jax.Array) and value.size
              and jnp.issubdtype(value.dtype, jnp.floating)]
    return min(floats, key=lambda array: array.size, default=None)


def _after(earlier: jax.Array, part: jax.Array) -> jax.Array:
    """Returns `part`, to the bit, in a form that the compiler cannot compute without `earlier`."""
    # XLA removes an `optimization_barrier` before its last search for equal operations; then it finds the array that
    # was gathered before, and keeps it (seen with jax 0.10 and 0.12, on CPUs and GPUs).
    number = lax.slice(earlier.ravel(), (0,), (1,))[0]
    never = (number != number) & (number == number)
    return jnp.where(never, jnp.zeros_like(part), part)


def _nbytes(shape: Any) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _run(equation: JaxprEqn, values: Sequence[Any], **changes: Any) -> list[Any]:
    if equation.primitive.name in _ELEMENTWISE and "sharding" in equation.params:
        changes["sharding"] = None  # the shape may differ
    return run(equation, values, **changes)
