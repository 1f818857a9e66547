"""A Linen module as pure functions.

Owns collections, random streams and training flags of Linen. It leaves the user's module untouched: all that differs
from a plain `module.apply` happens in a method interceptor.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList, unfreeze
from flax.errors import InvalidRngError

from trainer.core.tree_paths import SEPARATOR, named_leaves
from trainer.core.types import PyTree
from trainer.modules.base import (
    FLAGS,
    INTERMEDIATES,
    LOSSES,
    FunctionalModule,
    IsFrozen,
    MakeKey,
    call_arguments,
    key_for,
)
from trainer.modules.batch_norm import (
    call_linen_batch_norm,
    call_with_running_averages,
    is_layer_frozen,
    is_linen_batch_norm,
)
from trainer.modules.compute_dtype import call_linen_layer
from trainer.modules.remat import Rematerialisation, call_layer, rematerialise, take_out
from trainer.modules.summary import CallRecorder, LayerRow

_NESTED_FLAGS = ("deterministic", "use_running_average")


class LinenFunctional(FunctionalModule):
    """The functional form of a Linen module.

    The collection "params" is the parameters. Each other collection that `init` creates is state, except for "losses",
    "intermediates" and those whose structure changes when the module is applied, as `sow` makes it. What is sown begins
    empty in each call. State keeps the dtypes that it is created in, as float32 averages do of float64 data.

    What `nn.jit` has traced before, in the same process, stays as it was traced: it does not see other options of
    `apply`, such as `is_frozen`.

    Args:
      module: an unbound Linen module.
    """

    def __init__(self, module: nn.Module):
        self.name = module.name or type(module).__name__
        self._module = module
        # The streams that the module was seen to ask for: by `training`, and when it is created.
        self._streams: dict[bool, list[str]] = {True: [], False: []}
        self._streams_of_init: list[str] = []
        self._rematerialisation = Rematerialisation()
        self._sown: tuple[str, ...] = (LOSSES, INTERMEDIATES)
        self._sows_losses = False

    def is_batch_statistic(self, path: str) -> bool:
        """See the base class."""
        return path.startswith(f"batch_stats{SEPARATOR}")

    @property
    def sows_losses(self) -> bool:
        """See the base class."""
        return self._sows_losses

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class; `initial_values` is not used, as Linen modules hold no values."""
        params, collections, outputs = self._create(key, inputs)
        # The abstract step also finds the random streams, before a step is traced for good.
        after_step = jax.eval_shape(lambda: self._apply(
            params, collections, inputs, DenyList("params"), training=True,
            make_key=lambda name: key_for(key, name))[1])
        model_state = {name: values for name, values in collections.items()
                       if name not in (LOSSES, INTERMEDIATES) and _spec(values) == _spec(after_step.get(name))}
        self._sown = (LOSSES, INTERMEDIATES, *(name for name, values in after_step.items()
                                               if name not in model_state and _is_sown(values)))
        self._sows_losses = LOSSES in after_step
        return params, model_state, outputs

    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: bool = False, compute_dtype: Any = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        """See the base class."""
        state = {name: values for name, values in model_state.items() if name not in self._sown}
        outputs, updates = self._apply(
            params, state, inputs, [*state, *self._sown], training=training, make_key=make_key, batch_norm=batch_norm,
            remat=remat, compute_dtype=compute_dtype, is_frozen=is_frozen)
        if not training:
            updates = {name: values for name, values in updates.items() if name in self._sown}
        return outputs, {**state, **updates} if updates or len(state) < len(model_state) else model_state

    def _apply(
        self, params: dict, state: dict, inputs: PyTree, mutable: Any, *, training: bool, make_key: MakeKey,
        batch_norm: str = "global", remat: bool = False, compute_dtype: Any = None, is_frozen: IsFrozen | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the outputs and all collections that may change."""
        call = nn.apply(self._call(inputs, training), self._module, mutable=mutable)
        variables = {"params": params, **state}

        def outputs_and_updates(make_key: MakeKey) -> tuple[Any, Any]:
            with nn.intercept_methods(_interceptor(training, batch_norm, compute_dtype, is_frozen)):
                return _with_streams(self._streams[training],
                                     lambda streams: call(variables, rngs=_keys(streams, make_key)))

        outputs, updates = (self._rematerialisation.run(outputs_and_updates, make_key, inputs)
                            if remat and training else outputs_and_updates(make_key))
        return outputs, {name: _in_dtypes_of(state.get(name), values) for name, values in _plain(updates).items()}

    def absorb(self, params: dict, model_state: dict) -> None:
        """Does nothing: a Linen module holds no values."""

    def summary_rows(self, inputs: PyTree) -> list[LayerRow]:
        """See the base class."""
        recorder = CallRecorder(inputs)

        def record(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            if context.method_name != "__call__":
                return next_call(*args, **kwargs)
            recorder.begin(context.module.path, type(context.module).__name__)
            outputs = next_call(*args, **kwargs)
            recorder.end(context.module.path, outputs)
            return outputs

        with nn.intercept_methods(record):
            params, collections, _ = jax.eval_shape(lambda batch: self._create(jax.random.key(0), batch), inputs)
        return recorder.rows(params, list(collections.values()))

    def _create(self, key: jax.Array, inputs: PyTree) -> tuple[dict, dict, Any]:
        create = nn.init_with_output(self._call(inputs, training=False), self._module,
                                     mutable=DenyList(INTERMEDIATES))
        with nn.intercept_methods(_interceptor(training=False, batch_norm="global")):
            outputs, variables = _with_streams(
                self._streams_of_init,
                lambda streams: create({"params": key, **_keys(streams, lambda name: key_for(key, name))}))
        collections = _plain(variables)
        return collections.pop("params", {}), collections, outputs

    def _call(self, inputs: PyTree, training: bool) -> Callable[[nn.Module], Any]:
        args, kwargs = call_arguments(self._module, inputs, training)
        return lambda module: module(*args, **kwargs)


def _interceptor(training: bool, batch_norm: str, compute_dtype: Any = None,
                 is_frozen: IsFrozen | None = None) -> Callable[..., Any]:
    def intercept(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        call = functools.partial(call_or_rematerialise, next_call, context)
        return call_linen_layer(context.module, call, args, kwargs, compute_dtype)

    def call_or_rematerialise(next_call: Callable, context: nn.module.InterceptorContext, /, *args: Any,
                              **kwargs: Any) -> Any:
        if context.method_name != "__call__":
            return next_call(*args, **kwargs)
        module = context.module
        return call_layer(module.path, lambda: call_in_phase(next_call, args, kwargs, context),
                          lambda: _rematerialised(module, args, kwargs))

    def call_in_phase(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module, signature = context.module, inspect.signature(context.orig_method)
        bound = signature.bind(*args, **kwargs)
        for name in _NESTED_FLAGS:
            parameter = signature.parameters.get(name)
            if (parameter is not None and bound.arguments.get(name, parameter.default) is None
                    and getattr(module, name, None) is None):
                bound.arguments[name] = training if FLAGS[name] else not training
        if training and isinstance(module, nn.BatchNorm) and is_linen_batch_norm(context):
            given = bound.arguments.get("use_running_average")
            if not (module.use_running_average if given is None else given):
                if _is_frozen(module, is_frozen):
                    return call_with_running_averages(module, next_call, bound.arguments["x"])
                return call_linen_batch_norm(module, next_call, bound.arguments["x"], bound.arguments.get("mask"),
                                             batch_norm)
        return next_call(*bound.args, **bound.kwargs)

    return intercept


def _is_frozen(layer: nn.Module, is_frozen: IsFrozen | None) -> bool:
    path = SEPARATOR.join(layer.path)
    params = named_leaves(layer.variables.get("params", {}))
    return is_layer_frozen(path, [SEPARATOR.join((*layer.path, name)) for name in params], is_frozen)


def _rematerialised(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Flax has to see what is bound to variables. All else stays what it is: flags, strings, None.
    bound, put_back = take_out((args, kwargs), lambda leaf: (isinstance(leaf, (nn.Module, nn.Variable))
                                                             and leaf.scope is not None))

    def call_again(module: nn.Module, *bound: Any) -> Any:
        args, kwargs = put_back(*bound)
        return module(*args, **kwargs)  # Gets back to the interceptor, which now makes a plain call.

    return rematerialise(nn.remat, call_again, module, *bound)


def _with_streams(streams: list[str], call: Callable[[list[str]], Any]) -> Any:
    """Returns `call(streams)`, after adding to `streams` whatever else the module asks for.

    Flax tells which random streams a module uses only by asking for a missing stream.
    """
    while True:
        try:
            return call(streams)
        except InvalidRngError as error:
            missing = re.search(r'needs PRNG for "([^"]+)"', str(error))
            if missing is None or missing[1] in streams:
                raise
            streams.append(missing[1])


def _keys(streams: list[str], make_key: MakeKey) -> dict[str, jax.Array]:
    return {stream: make_key(stream) for stream in streams}


def _plain(variables: Any) -> dict[str, Any]:
    """Returns nested dicts of arrays, without Flax's boxes for metadata."""
    return unfreeze(nn.meta.unbox(variables))


def _in_dtypes_of(stored: Any, updated: Any) -> Any:
    """Returns `updated` in the dtypes of `stored`, in which a compiled step takes it; as it is if they do not fit."""
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(stored)
    if structure != jax.tree.structure(updated):
        return updated
    return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype) if _same_kind(old, new) else new, stored, updated)


def _same_kind(*arrays: Any) -> bool:
    dtypes = [jnp.result_type(array) for array in arrays]
    return any(all(jnp.issubdtype(dtype, kind) for dtype in dtypes)
               for kind in (jnp.integer, jnp.floating, jnp.complexfloating))


def _is_sown(collection: Any) -> bool:
    """Returns whether all values of a collection are in tuples, as `sow` keeps them: others need to be stored."""
    leaves = jax.tree.leaves(collection, is_leaf=lambda value: isinstance(value, tuple))
    return all(isinstance(leaf, tuple) for leaf in leaves)


def _spec(tree: PyTree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
