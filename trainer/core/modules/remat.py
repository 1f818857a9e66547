"""Rematerialization: the backward pass recomputes the inner activations of chosen layers instead of keeping them.

Owns the choice of these layers, and their calls. It must not know Linen or NNX: adapters report the layer calls. Only
the inputs and outputs of a rematerialized layer are kept, and values that a policy selects (`remat_policies.py`). Its
inner activations exist again while its own gradient is computed, at the cost of a second forward pass. See Chen et al.,
https://arxiv.org/abs/1604.06174, and `jax.checkpoint`.

The choice starts with the layers that the module itself calls; a layer that holds too much is replaced by the layers
that it calls. A layer holds too much if its inner activations exceed a limit. The limit minimizes the peak memory of
the backward pass: the bytes of the outputs of all chosen layers plus the inner activations of the largest chosen layer.
So each block of a stack of blocks is chosen; a wrapper around a backbone saves as much as the backbone alone, with or
without a head next to it; and an encoder and a decoder are not recomputed as a whole.

The inner activations of a layer are estimated as the outputs of the layers that it calls in a single execution. A layer
in the body of a scan is executed many times: in a scan over blocks, the block is recomputed, and not the scan.

Only calls of `__call__` count as layers. Other methods of a layer, and its own computation, belong to that layer; in a
layer that is split they are kept as usual. Functions that `nn.jit` has already compiled call no layers, so they are
kept too.

Outputs, gradients, random numbers and state equal the results of a plain call. BatchNorm statistics are always kept, so
replicas exchange nothing twice. On CPU, XLA of jax 0.10 undoes every rematerialization outside of scans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

from trainer.core.ambient import state
from trainer.core.modules import remat_policies
from trainer.core.modules.base import key_for
from trainer.core.modules.batch_norm import STATISTICS_NAME
from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.remat_policies import Remat, RematPolicy
from trainer.core.types import PyTree

Call = Callable[[], Any]
Plan = dict[Hashable, "Plan | None"]
"""Plan for the layers that a layer calls, by name: None rematerializes a layer, else the plan for its layers."""

_NUMBERS = itertools.count()

class Rematerialisation:
    """Runs a module with rematerialization, and remembers the choice of its layers."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def run(self, apply: Callable[[MakeKey], Any], make_key: MakeKey, inputs: PyTree, remat: Remat) -> Any:
        """Returns `apply(make_key)`, with the chosen layers rematerialized.

        An abstract run chooses the layers, once for each structure and shapes of the inputs.

        Args:
          apply: applies the module; each layer is called by `call_layer`.
          make_key: returns the key of a random stream.
          inputs: the batch.
          remat: the policy, or True.
        """
        policy = remat_policies.get(remat)
        assert policy is not None
        leaves, structure = jax.tree.flatten(inputs)
        spec = structure, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if spec not in self._plans:
            self._plans[spec] = _choose(apply)
        with _observed_by(_Rematerialiser(self._plans[spec], policy)):
            return apply(make_key)


def call_layer(path: Hashable, call: Call, rematerialised: Call) -> Any:
    """Returns the outputs of a layer, from a plain call unless it is chosen for rematerialization.

    Args:
      path: a name that is unique among the layers of the caller.
      call: calls the layer.
      rematerialised: calls the layer by `rematerialise`.
    """
    observer: _Observer | None = state.current().layer_observer
    return call() if observer is None else observer.call_layer(path, call, rematerialised)


def call_function(name: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns `function(*args, **kwargs)`. The function counts as a layer of that name, without parameters."""
    def call() -> Any:
        return function(*args, **kwargs)

    return call_layer(name, call, lambda: rematerialise(jax.checkpoint, call))


def rematerialise(transform: Callable[..., Any], call: Callable[..., Any], *objects: Any) -> Any:
    """Returns `call(*objects)` with rematerialization. The outputs may have leaves of any type.

    Args:
      transform: `jax.checkpoint`, or a form of it that takes objects other than arrays as arguments.
      call: a function that may also use arrays of the scope around it.
      objects: the objects to pass through the transformation.
    """
    structure: Any = None
    constants: dict[int, Any] = {}

    def arrays_of_call(*objects: Any) -> list[jax.Array]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(call(*objects))
        constants.update({index: leaf for index, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)})
        return [leaf for index, leaf in enumerate(leaves) if index not in constants]

    # Both passes of a step are in one program, also in a loop over steps. Unless prevented, XLA would merge their equal
    # computations and keep the results.
    observer: _Observer | None = state.current().layer_observer
    policy = remat_policies.NOTHING if observer is None else observer.policy
    arrays = iter(transform(arrays_of_call, prevent_cse=True, policy=policy.keeping(STATISTICS_NAME))(*objects))
    return jax.tree.unflatten(structure, [constants[index] if index in constants else next(arrays)
                                          for index in range(structure.num_leaves)])


def take_out(tree: PyTree, is_taken: Callable[[Any], bool]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the chosen leaves of a tree, and a function that puts other leaves in their places.

    >>> taken, put_back = take_out({"x": 1, "name": "mean"}, lambda leaf: isinstance(leaf, int))
    >>> taken, put_back(5)
    ([1], {'name': 'mean', 'x': 5})
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_taken)
    places = [index for index, leaf in enumerate(leaves) if is_taken(leaf)]

    def put_back(*others: Any) -> Any:
        replaced = dict(zip(places, others, strict=True))
        return jax.tree.unflatten(structure, [replaced.get(index, leaf) for index, leaf in enumerate(leaves)])

    return [leaves[index] for index in places], put_back


def _choose(apply: Callable[[MakeKey], Any]) -> Plan:
    recorder = _Recorder()

    def record() -> None:
        apply(lambda name: key_for(jax.random.key(0), name))

    with _observed_by(recorder):
        program = jax.make_jaxpr(record)()
    return recorder.plan(program)


class _Observer(Protocol):
    policy: RematPolicy

    def call_layer(self, path: Hashable, call: Call, rematerialised: Call) -> Any: ...


def _observed_by(observer: _Observer) -> contextlib.AbstractContextManager[None]:
    return state.replaced(layer_observer=observer)


class _Rematerialiser:
    """Follows a plan from layer to layer."""

    def __init__(self, plan: Plan, policy: RematPolicy):
        self._plan = plan
        self.policy = policy

    def call_layer(self, path: Hashable, call: Call, rematerialised: Call) -> Any:
        outer, inner = self._plan, self._plan.get(path, {})
        self._plan = inner or {}
        try:
            return rematerialised() if inner is None else call()
        finally:
            self._plan = outer


@dataclasses.dataclass
class _Layer:
    """Record of a layer's calls by its caller."""

    executions: float = 0.0
    output_bytes: float = 0.0
    layers: dict[Hashable, _Layer] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def inner_bytes(self) -> float:
        """Bytes of the outputs of the called layers in a single execution; final once all calls are recorded."""
        return sum(layer.output_bytes + layer.executions * layer.inner_bytes
                   for layer in self.layers.values()) / max(self.executions, 1)

    def plan(self, limit: float) -> Plan:
        return {path: layer.plan(limit) if layer.inner_bytes > limit else None for path, layer in self.layers.items()}

    def chosen(self, limit: float) -> list[_Layer]:
        return [chosen for layer in self.layers.values()
                for chosen in (layer.chosen(limit) if layer.inner_bytes > limit else [layer])]

    def limits(self) -> set[float]:
        return {self.inner_bytes}.union(*(layer.limits() for layer in self.layers.values()))


class _Recorder:
    """Records the calls of layers, and makes the plan."""

    policy = remat_policies.NOTHING

    def __init__(self) -> None:
        self._module_path: Hashable = None
        self._module = _Layer()
        self._caller: _Layer | None = None
        self._called: dict[str, _Layer] = {}

    def call_layer(self, path: Hashable, call: Call, rematerialised: Call) -> Any:
        outer = self._caller
        if outer is None:
            # The module itself. It is called again if it asks for a missing random stream.
            layer = self._module = _Layer()
            self._module_path = path
        else:
            layer = outer.layers.setdefault(path, _Layer())
        self._caller = layer
        try:
            outputs = call()
        finally:
            self._caller = outer
        # This name marks the outputs in the traced program, to find the number of executions and the output bytes.
        name = f"call {next(_NUMBERS)}"
        self._called[name] = layer
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, name) if isinstance(leaf, jax.Array) else leaf, outputs)

    def plan(self, program: ClosedJaxpr | Jaxpr) -> Plan:
        """Returns the plan for the module that was run as `program`, a jaxpr."""
        self._measure(program, 1, set())

        def bytes_at_peak(limit: float) -> float:
            chosen = self._module.chosen(limit)
            return sum(layer.output_bytes for layer in chosen) + max((layer.inner_bytes for layer in chosen), default=0)

        # From the largest: of equally good limits, the largest splits the fewest layers.
        limit = min(sorted(self._module.limits(), reverse=True), key=bytes_at_peak)
        return {self._module_path: self._module.plan(limit)}

    def _measure(self, program: Any, times: int, seen: set[str]) -> None:
        for equation in program.eqns:
            name = equation.params.get("name")
            if equation.primitive.name == "name" and name in self._called:
                layer = self._called[name]
                layer.executions += 0 if name in seen else times
                layer.output_bytes += times * sum(output.aval.size * output.aval.dtype.itemsize
                                                  for output in equation.outvars)
                seen.add(name)
            inner_times = times * equation.params["length"] if equation.primitive.name == "scan" else times
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    if hasattr(inner, "eqns"):
                        self._measure(inner, inner_times, seen)
