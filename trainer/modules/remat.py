"""Rematerialisation: layers whose inner activations the backward pass computes again instead of keeping them.

Owns which layers those are, and how a call is made so. It must not know Linen or NNX: adapters tell it which layer is
being called. Of a rematerialised layer only the inputs and outputs are kept. Its inner activations exist again while
its own gradient is computed, at the price of a second forward pass. See Chen et al., https://arxiv.org/abs/1604.06174,
and `jax.checkpoint`.

Which layers: those that the module itself calls, and in place of each that holds too much the layers that it calls. A
layer holds too much if its inner activations exceed a limit, and that limit is taken for which the outputs of all
chosen layers and the inner activations of the largest of them are the fewest bytes together: what the backward pass
needs at its peak. Thus of a stack of blocks each block is chosen; a wrapper around a backbone saves what the backbone
alone would, whether or not a head stands next to it; and an encoder and a decoder are not computed again as a whole.

What a layer holds is estimated by the outputs of the layers that it calls when it is executed once. A layer in the body
of a scan is executed many times: of a scan over blocks it is the block that is computed again, and not the scan.

Only calls by `__call__` count as layers. A layer's other methods, and what it computes itself, belong to that layer; in
a module that is split they are kept as usual. So is what `nn.jit` has compiled before, which calls no layers.

Outputs, gradients, random numbers and state are those of a plain call. The statistics of BatchNorm are always kept, so
that replicas exchange nothing twice. On CPU, XLA of jax 0.10 undoes every rematerialisation outside of scans.
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

from trainer.core.ambient import state
from trainer.core.types import PyTree
from trainer.modules.base import key_for
from trainer.modules.batch_norm import STATISTICS_NAME
from trainer.modules.calling.call_arguments import MakeKey

Call = Callable[[], Any]
Plan = dict[Hashable, "Plan | None"]
"""What to do with the layers that a layer calls, by name: None to rematerialise a layer, else the plan for its
layers."""

_NUMBERS = itertools.count()

_POLICY = jax.checkpoint_policies.save_only_these_names(STATISTICS_NAME)


class Rematerialisation:
    """Runs one module with rematerialisation, and remembers which of its layers are chosen."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def run(self, apply: Callable[[MakeKey], Any], make_key: MakeKey, inputs: PyTree) -> Any:
        """Returns `apply(make_key)`, with the chosen layers rematerialised.

        Layers are chosen from an abstract run, once for each structure and shapes of the inputs.

        Args:
          apply: applies the module, so that each layer is called by `call_layer`.
          make_key: gives the key of a random stream.
          inputs: the batch that the module is applied to.
        """
        leaves, structure = jax.tree.flatten(inputs)
        spec = structure, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if spec not in self._plans:
            self._plans[spec] = _choose(apply)
        with _observed_by(_Rematerialiser(self._plans[spec])):
            return apply(make_key)


def call_layer(path: Hashable, call: Call, rematerialised: Call) -> Any:
    """Returns what a layer returns, by a plain call unless it is chosen for rematerialisation.

    Args:
      path: a name that is unique among the layers of the caller.
      call: calls the layer.
      rematerialised: calls it by `rematerialise`.
    """
    observer: _Observer | None = state.current().layer_observer
    return call() if observer is None else observer.call_layer(path, call, rematerialised)


def call_function(name: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns `function(*args, **kwargs)`, where a function without parameters is a layer of that name."""
    def call() -> Any:
        return function(*args, **kwargs)

    return call_layer(name, call, lambda: rematerialise(jax.checkpoint, call))


def rematerialise(transform: Callable[..., Any], call: Callable[..., Any], *objects: Any) -> Any:
    """Returns `call(*objects)` under rematerialisation. Its outputs may have leaves of any type.

    Args:
      transform: `jax.checkpoint`, or a form of it that takes other objects than arrays as arguments.
      call: may also use arrays of the scope around it.
      objects: what must be passed through the transformation.
    """
    structure: Any = None
    constants: dict[int, Any] = {}

    def arrays_of_call(*objects: Any) -> list[jax.Array]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(call(*objects))
        constants.update({index: leaf for index, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)})
        return [leaf for index, leaf in enumerate(leaves) if index not in constants]

    # Both passes of a step are in one program, also in a loop over steps. Unless prevented, XLA would find that they
    # compute the same, and keep it.
    arrays = iter(transform(arrays_of_call, prevent_cse=True, policy=_POLICY)(*objects))
    return jax.tree.unflatten(structure, [constants[index] if index in constants else next(arrays)
                                          for index in range(structure.num_leaves)])


def take_out(tree: PyTree, is_taken: Callable[[Any], bool]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the leaves of a tree that are to be taken, and the function that puts others in their places.

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
    def call_layer(self, path: Hashable, call: Call, rematerialised: Call) -> Any: ...


def _observed_by(observer: _Observer) -> contextlib.AbstractContextManager[None]:
    return state.replaced(layer_observer=observer)


class _Rematerialiser:
    """Follows a plan from layer to layer."""

    def __init__(self, plan: Plan):
        self._plan = plan

    def call_layer(self, path: Hashable, call: Call, rematerialised: Call) -> Any:
        outer, inner = self._plan, self._plan.get(path, {})
        self._plan = inner or {}
        try:
            return rematerialised() if inner is None else call()
        finally:
            self._plan = outer


@dataclasses.dataclass
class _Layer:
    """What one layer's calls of another were seen to do."""

    executions: float = 0.0
    output_bytes: float = 0.0
    layers: dict[Hashable, _Layer] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def inner_bytes(self) -> float:
        """What the layers that it calls return in one execution; to be read when all calls are recorded."""
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
    """Records which layer calls which, and chooses."""

    def __init__(self) -> None:
        self._module_path: Hashable = None
        self._module = _Layer()
        self._caller: _Layer | None = None
        self._called: dict[str, _Layer] = {}

    def call_layer(self, path: Hashable, call: Call, rematerialised: Call) -> Any:
        outer = self._caller
        if outer is None:
            # The module itself. It is called once more if it asked for a random stream that was not there.
            layer = self._module = _Layer()
            self._module_path = path
        else:
            layer = outer.layers.setdefault(path, _Layer())
        self._caller = layer
        try:
            outputs = call()
        finally:
            self._caller = outer
        # The program that is traced tells by this mark how often the call is executed, and the size of what it returns.
        name = f"call {next(_NUMBERS)}"
        self._called[name] = layer
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, name) if isinstance(leaf, jax.Array) else leaf, outputs)

    def plan(self, program: Any) -> Plan:
        """Returns the plan for the module that was run as `program`, a jaxpr."""
        self._measure(program, 1, set())

        def bytes_at_peak(limit: float) -> float:
            chosen = self._module.chosen(limit)
            return sum(layer.output_bytes for layer in chosen) + max((layer.inner_bytes for layer in chosen), default=0)

        # From the largest: of equally good limits, that which takes the fewest layers apart.
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
