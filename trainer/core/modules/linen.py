"""A Linen module as pure functions.

Owns collections and random streams of Linen. The user's module stays unchanged: a method interceptor makes all
differences to a plain `module.apply`; see `linen_calls.py`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList, unfreeze
from flax.errors import InvalidRngError
from jax.typing import DTypeLike

from trainer.core.compile.constraints import on_mesh_of_strategy
from trainer.core.modules.annotations import layouts_of_boxes
from trainer.core.modules.base import INTERMEDIATES, LOSSES, FunctionalModule, IsFrozen, key_for
from trainer.core.modules.calling.call_arguments import CallKwargs, MakeKey, call_arguments, input_names
from trainer.core.modules.calling.mode_check import ModeCheck
from trainer.core.modules.linen_calls import LinenCalls, StreamWanted, holds_configured_batch_norm
from trainer.core.modules.remat import Rematerialisation
from trainer.core.modules.remat_policies import Remat
from trainer.core.modules.sequential import LinenStack
from trainer.core.modules.summary import CallObserver, ModuleLayer
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import Layout, PyTree

_NO_KWARGS = CallKwargs()


class LinenFunctional(FunctionalModule):
    """The functional form of a Linen module.

    The collection "params" holds the parameters. Each other collection created by `init` is state, except for "losses",
    "intermediates" and collections whose structure changes in `apply`, as with `sow`. Sown collections begin empty in
    each call. State keeps its initial dtypes, such as float32 averages of float64 data.

    Functions that `nn.jit` has already traced in the same process keep their trace: they ignore other options of
    `apply`, such as `is_frozen`.

    Args:
      module: an unbound Linen module.
      call_kwargs: keyword arguments that the user sets for each call.
      intercept: returns an interceptor for the calls of layers, in training or not, which sees each call as Flax's own
        code does, within rematerialization; None for no other interceptor.

    Attributes:
      module, call_kwargs: the arguments.
    """

    def __init__(self, module: nn.Module, call_kwargs: CallKwargs = _NO_KWARGS,
                 intercept: Callable[[bool], Callable[..., Any]] | None = None):
        call_kwargs.check(module)
        self._intercept = intercept
        self.name = module.name or type(module).__name__
        self.module = module
        self.call_kwargs = call_kwargs
        self._is_checked = {True: call_kwargs.train is None and not holds_configured_batch_norm(module),
                            False: call_kwargs.eval is None}
        # The random streams that the module has asked for: by `training`, and in `init`.
        self._streams: dict[bool, list[str]] = {True: [], False: []}
        self._streams_of_init: list[str] = []
        self._rematerialisation = Rematerialisation()
        self._sown: tuple[str, ...] = (LOSSES, INTERMEDIATES)
        self._sows_losses = False
        self._layouts: dict[str, Layout] = {}
        self._embeddings: set[str] = set()

    @property
    def input_names(self) -> tuple[str, ...]:
        return input_names(self.module)

    def is_batch_statistic(self, path: str) -> bool:
        return path.startswith(f"batch_stats{SEPARATOR}")

    @property
    def layouts(self) -> dict[str, Layout]:
        return self._layouts

    @property
    def embeddings(self) -> frozenset[str]:
        return frozenset(self._embeddings)

    @property
    def sows_losses(self) -> bool:
        return self._sows_losses

    @on_mesh_of_strategy()
    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class. `initial_values` is unused, because Linen modules hold no values."""
        params, collections, outputs = self._create(key, inputs)
        # The abstract step also finds the random streams before the first real trace.
        after_step = jax.eval_shape(lambda: self._apply(
            params, collections, inputs, DenyList("params"), training=True,
            make_key=lambda name: key_for(key, name))[1])
        model_state = {name: values for name, values in collections.items()
                       if name not in (LOSSES, INTERMEDIATES) and _spec(values) == _spec(after_step.get(name))}
        self._sown = (LOSSES, INTERMEDIATES, *(name for name, values in after_step.items()
                                               if name not in model_state and _is_sown(values)))
        self._sows_losses = LOSSES in after_step
        return params, model_state, outputs

    @on_mesh_of_strategy()
    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        state = {name: values for name, values in model_state.items() if name not in self._sown}
        check = ModeCheck(training) if self._is_checked[training] else None
        outputs, updates = self._apply(
            params, state, inputs, [*state, *self._sown], training=training, make_key=make_key, batch_norm=batch_norm,
            remat=remat, compute_dtype=compute_dtype, is_frozen=is_frozen, check=check)
        if check is not None:
            check.raise_found(self.module, () if training else self._streams[False])
        if not training:
            updates = {name: values for name, values in updates.items() if name in self._sown}
        return outputs, {**state, **updates} if updates or len(state) < len(model_state) else model_state

    def _apply(
        self, params: dict, state: dict, inputs: PyTree, mutable: Any, *, training: bool, make_key: MakeKey,
        batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
        is_frozen: IsFrozen | None = None, check: ModeCheck | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the outputs and all mutable collections."""
        variables = {"params": params, **state}
        calls = LinenCalls(training, batch_norm, compute_dtype, is_frozen, check, self._streams[training])

        def outputs_and_updates(make_key: MakeKey) -> tuple[Any, Any]:
            call = nn.apply(self._call(inputs, training, make_key), self.module, mutable=mutable)
            with self._intercepted(calls):
                return _with_streams(self._streams[training],
                                     lambda streams: call(variables, rngs=_keys(streams, make_key)))

        outputs, updates = (self._rematerialisation.run(outputs_and_updates, make_key, inputs, remat)
                            if remat and training else outputs_and_updates(make_key))
        return outputs, {name: _in_dtypes_of(state.get(name), values) for name, values in _plain(updates).items()}

    def absorb(self, params: dict, model_state: dict) -> None:
        """Does nothing: a Linen module holds no values."""

    @on_mesh_of_strategy()
    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        def record(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            if context.method_name != "__call__":
                return next_call(*args, **kwargs)
            path = context.module.path
            args, kwargs = observer.begin(path, type(context.module).__name__, (args, kwargs))
            return observer.end(path, next_call(*args, **kwargs))

        def outputs_of(params: dict, state: dict, batch: PyTree) -> Any:
            key = jax.random.key(0)
            return self.apply(params, state, batch, training=False, make_key=lambda name: key_for(key, name))[0]

        params, collections, _ = jax.eval_shape(lambda batch: self._create(jax.random.key(0), batch), inputs)
        state = {name: values for name, values in collections.items() if name not in self._sown}
        with nn.intercept_methods(record):
            observer.trace(outputs_of, params, state, inputs)
        return params, list(collections.values())

    @on_mesh_of_strategy()
    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        """See the base class. Layers without weights and the functions of a stack are included."""
        module, found = self.module, {"": self.module}
        if isinstance(module, LinenStack):
            # Flax's names of the layers; a layer that occurs twice has a single name.
            owners = {id(layer): name for name, layer in reversed(list(zip(module.names, module.layers, strict=True)))}
            found |= {owners[id(layer)]: layer for layer in module.layers}
        elif inputs is None:
            raise RuntimeError(f"The layers of {self.name!r} are made when it is called, and it is not built. Call "
                               "`build(sample)` with some rows of inputs, or `fit`.")
        if inputs is None:
            return list(starmap(ModuleLayer, found.items()))

        def record(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            layer, path = context.module, context.module.path
            for end in range(1, len(path) + 1):  # includes layers whose own `__call__` is not called
                if (name := SEPARATOR.join(path[:end])) not in found:
                    found[name] = _ancestor(layer, len(path) - end).unbind()[0]
            return next_call(*args, **kwargs)

        with nn.intercept_methods(record):
            jax.eval_shape(lambda batch: self._create(jax.random.key(0), batch), inputs)
        return list(starmap(ModuleLayer, found.items()))

    def layer_path(self, path: str) -> str:
        return path.partition(SEPARATOR)[2]

    def _create(self, key: jax.Array, inputs: PyTree) -> tuple[dict, dict, Any]:
        make_key = functools.partial(key_for, key)
        create = nn.init_with_output(self._call(inputs, False, make_key), self.module, mutable=DenyList(INTERMEDIATES))

        def note_embedding(next_call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            if isinstance(context.module, nn.Embed) and context.module.scope is not None:
                self._embeddings.add(SEPARATOR.join((*context.module.path, "embedding")))
            return next_call(*args, **kwargs)

        calls = LinenCalls(training=False, streams=self._streams_of_init)
        with nn.intercept_methods(note_embedding), self._intercepted(calls):
            outputs, variables = _with_streams(
                self._streams_of_init, lambda streams: create({"params": key, **_keys(streams, make_key)}))
        self._layouts = layouts_of_boxes(variables.get("params", {}))
        collections = _plain(variables)
        return collections.pop("params", {}), collections, outputs

    @contextlib.contextmanager
    def _intercepted(self, calls: LinenCalls) -> Iterator[None]:
        with nn.intercept_methods(calls.intercept):
            if self._intercept is None:
                yield
            else:
                with nn.intercept_methods(self._intercept(calls.training)):
                    yield

    def _call(self, inputs: PyTree, training: bool, make_key: MakeKey) -> Callable[[nn.Module], Any]:
        args, kwargs = call_arguments(self.module, inputs, training, make_key, self.call_kwargs.of(training))
        return lambda module: module(*args, **kwargs)


def _ancestor(layer: Any, levels: int) -> nn.Module:
    """Returns the ancestor of a bound layer, `levels` levels up."""
    for _ in range(levels):
        layer = layer.parent
    return layer


def _with_streams(streams: list[str], call: Callable[[list[str]], Any]) -> Any:
    """Returns `call(streams)`, after adding all other random streams of the module to `streams`."""
    # Flax names a module's random streams only in errors about missing streams; `has_rng` raises `StreamWanted`.
    while True:
        try:
            return call(streams)
        except StreamWanted as wanted:
            streams.append(wanted.name)
        except InvalidRngError as error:
            missing = re.search(r'needs PRNG for "([^"]+)"', str(error))
            if missing is None or missing[1] in streams:
                raise
            streams.append(missing[1])


def _keys(streams: list[str], make_key: MakeKey) -> dict[str, jax.Array]:
    return {stream: make_key(stream) for stream in streams}


def _plain(variables: PyTree) -> dict[str, Any]:
    """Returns nested dicts of arrays, without Flax's metadata boxes."""
    return unfreeze(nn.meta.unbox(variables))


def _in_dtypes_of(stored: PyTree, updated: PyTree) -> Any:
    """Returns `updated` cast to the dtypes of `stored`, which a compiled step expects, where the two match."""
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(stored)
    if structure != jax.tree.structure(updated):
        return updated
    return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype) if _same_kind(old, new) else new, stored, updated)


def _same_kind(*arrays: Any) -> bool:
    dtypes = [jnp.result_type(array) for array in arrays]
    return any(all(jnp.issubdtype(dtype, kind) for dtype in dtypes)
               for kind in (jnp.integer, jnp.floating, jnp.complexfloating))


def _is_sown(collection: object) -> bool:
    """Returns whether all values of a collection are in tuples, as `sow` stores them; other collections are state."""
    leaves = jax.tree.leaves(collection, is_leaf=lambda value: isinstance(value, tuple))
    return all(isinstance(leaf, tuple) for leaf in leaves)


def _spec(tree: PyTree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
