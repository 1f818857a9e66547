"""An NNX module as pure functions.

Owns the split of an NNX object into parameters, state and random streams. All methods but `absorb` work on a private
clone, so the user's object, its mode and its class never change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import DenyList
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike

from trainer.core import errors
from trainer.core.compile.constraints import on_mesh_of_strategy
from trainer.core.compile.traces.passed_through import is_passed_through
from trainer.core.modules.annotations import layouts_of_metadata
from trainer.core.modules.base import INTERMEDIATES, LOSSES, FunctionalModule, IsFrozen, key_for
from trainer.core.modules.batch_norm import is_layer_frozen
from trainer.core.modules.calling.call_arguments import CallKwargs, MakeKey, call_arguments, input_names
from trainer.core.modules.calling.mode_check import ModeCheck
from trainer.core.modules.linen_calls import LinenCalls
from trainer.core.modules.nnx_batch_norm import params_of_nnx_batch_norms, replace_nnx_batch_norms, set_nnx_policy
from trainer.core.modules.nnx_compute_dtype import set_nnx_compute_dtype
from trainer.core.modules.nnx_sequential import NNXStack
from trainer.core.modules.remat import Rematerialisation, call_layer, rematerialise, take_out
from trainer.core.modules.remat_policies import Remat
from trainer.core.modules.summary import CallObserver, CallRecorder, ModuleLayer
from trainer.core.overwritten import OVERWRITTEN
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import Layout, PyTree

Path = tuple[Any, ...]


class _Variant(NamedTuple):
    """Options of a private clone's layers; `frozen` holds the paths of frozen BatchNorm layers."""

    training: bool
    batch_norm: str = "global"
    compute_dtype: Any = None
    frozen: frozenset[Path] = frozenset()


class _PendingChecks(NamedTuple):
    """Possible faults of a call that remain to be checked: layers in the wrong phase, and writes to parameters."""

    is_in_other_mode: bool
    writes_params: bool


_NO_KWARGS = CallKwargs()


class NNXFunctional(FunctionalModule):
    """The functional form of an NNX module.

    `nnx.Param` variables are the parameters. Each call derives keys and counts of random streams from the paths of the
    streams, so they are not part of the state. Neither are sown values, nor variables of a type named "Loss": they
    begin empty, or as zeros, in each call. All other variables are state.

    Args:
      module: an NNX module. Training starts from its values.
      call_kwargs: keyword arguments that the user sets for each call.

    Raises:
      TypeError: the module holds arrays, but no `nnx.Param`; or it wraps Linen's FP8 layers.

    Attributes:
      module: the user's module.
      call_kwargs: the argument.
    """

    def __init__(self, module: nnx.Module, call_kwargs: CallKwargs = _NO_KWARGS):
        call_kwargs.check(module)
        self.name = type(module).__name__
        self.module = module
        self.call_kwargs = call_kwargs
        self._template = _abstract_clone(module)
        variables = dict(nnx.to_flat_state(nnx.state(self._template)))
        self._random = {path: value for path, value in variables.items() if isinstance(value, nnx.RngState)}
        self._params = {path: value for path, value in variables.items() if isinstance(value, nnx.Param)}
        self._param_paths = list(self._params)
        self._losses = {path: value for path, value in variables.items() if _is_loss(value)}
        self._state_paths = [path for path in variables
                             if path not in {*self._random, *self._param_paths, *self._losses}]
        self._batch_statistics = {
            _joined(path) for path, value in variables.items() if isinstance(value, nnx.BatchStat)}
        self._sows_losses = bool(self._losses)
        self._check_weights_are_params(variables)
        if any(type(value).__name__ == OVERWRITTEN for value in variables.values()):
            raise TypeError(f"{self.name} wraps a Linen module with the collection {OVERWRITTEN!r}, such as the scales "
                            "of FP8 layers, which each step overwrites with its gradient. NNX modules have no such "
                            "collection here: make the whole model a Linen module.")
        self._params_of_batch_norms = {
            layer: list(map(_joined, paths)) for layer, paths in params_of_nnx_batch_norms(self._template).items()}
        self._bridges = [path for path, layer in nnx.iter_modules(self._template)
                         if isinstance(layer, nnx.bridge.ToNNX)]
        self._rematerialisation = Rematerialisation()
        self._graphdefs: dict[_Variant, nnx.GraphDef] = {}

    @property
    def initial_values(self) -> tuple[dict, dict]:
        """`(params, model_state)` with the current arrays of the user's module."""
        return self._values(self.module)

    @on_mesh_of_strategy()
    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class. Parameters and state are copies of `initial_values`."""
        params, model_state = jax.tree.map(jnp.copy, self.initial_values if initial_values is None else initial_values)
        make_key = functools.partial(key_for, key)
        (outputs, after), _ = self._apply(params, model_state, inputs, _Variant(training=False), make_key)
        self._sows_losses |= LOSSES in after
        if not self._sows_losses:  # it may sow in training only
            self._sows_losses = LOSSES in jax.eval_shape(
                lambda: self._apply(params, model_state, inputs, _Variant(training=True), make_key)[0][1])
        return params, model_state, outputs

    @property
    def input_names(self) -> tuple[str, ...]:
        return input_names(self.module)

    def is_batch_statistic(self, path: str) -> bool:
        return path in self._batch_statistics

    @property
    def layouts(self) -> dict[str, Layout]:
        params = {_joined(path): variable.get_metadata() for path, variable in self._params.items()}
        return layouts_of_metadata(params)

    @property
    def param_variables(self) -> dict[Path, nnx.Param]:
        return self._params

    @property
    def sows_losses(self) -> bool:
        return self._sows_losses

    @on_mesh_of_strategy()
    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        """See the base class. The name of a random stream is its path, such as "dropout/rngs"."""
        variant = _Variant(training, batch_norm, compute_dtype, self._frozen(is_frozen) if training else frozenset())
        check = ModeCheck(training) if self.call_kwargs.of(training) is None else None
        linen_calls = LinenCalls(training, batch_norm, compute_dtype, self._is_frozen_in_linen(is_frozen), check)
        returned, pending = self._apply(
            params, model_state, inputs, variant, make_key, linen_calls,
            remat if training else False)
        if training and pending.writes_params:
            self._refuse_writes(params, model_state, inputs, variant, make_key)
        if check is not None:
            if pending.is_in_other_mode:
                jax.eval_shape(lambda: self._retrace_to_check(params, model_state, inputs, variant, make_key, check))
            check.raise_found(self.module)
        return returned

    def _check_weights_are_params(self, variables: Mapping[Path, Any]) -> None:
        """Raises TypeError for a module whose weights are all bare arrays, which NNX does not train either."""
        arrays = [_joined(path) for path, value in variables.items()
                  if not isinstance(value, nnx.Variable) and jnp.issubdtype(value.dtype, jnp.inexact)]
        if arrays and not self._params:
            raise TypeError(
                f"{self.name} has no `nnx.Param`. Received: bare arrays in {', '.join(arrays[:errors.MAX_ITEMS])}, "
                "which are state that would not be trained. Write `nnx.Param(array)` where they are weights; if they "
                "are constants, pass a function that calls the module: `lambda x: module(x)`.")

    def _apply(self, params: dict, model_state: dict, inputs: PyTree, variant: _Variant, make_key: MakeKey,
               linen_calls: LinenCalls | None = None, remat: Remat = False) -> tuple[tuple[Any, dict], _PendingChecks]:
        """Returns the result of `apply`, and possible faults of the call."""
        linen_calls, is_suspect, writes = linen_calls or LinenCalls(variant.training), bool(remat), False

        def outputs_and_state(make_key: MakeKey) -> tuple[Any, dict]:
            nonlocal is_suspect, writes
            module = self._merge(params, model_state, make_key, variant)
            if remat:
                _hook_calls(module, _call_or_rematerialise)
            before, params_before = self._changing(module), self._params_of(module)
            args, kwargs = self._arguments(module, inputs, variant.training, make_key)
            with nn.intercept_methods(linen_calls.intercept), _may_sow():
                outputs = module(*args, **kwargs)
            after = self._changing(module)
            writes = any(value is not params_before[path] for path, value in self._params_of(module).items())
            moved = {path for path, value in before.items() if after[path] is not value}
            if variant.training:
                is_suspect |= any((*layer, "mean") not in moved
                                  for layer in self._params_of_batch_norms if layer not in variant.frozen)
            else:
                is_suspect |= bool(moved) or any(isinstance(value, nnx.Rngs) for value in kwargs.values())
            state, sown = self._values(module)[1] if variant.training else model_state, self._sown(module)
            return outputs, {**state, **sown} if sown else state

        returned = (self._rematerialisation.run(outputs_and_state, make_key, inputs, remat) if remat
                    else outputs_and_state(make_key))
        return returned, _PendingChecks(is_suspect, writes)

    def _refuse_writes(self, params: dict, model_state: dict, inputs: PyTree, variant: _Variant,
                       make_key: MakeKey) -> None:
        """Raises ValueError if a call in training changes parameters, as NNX's transformations only appear to do."""
        def after_a_call(values: dict[Path, Any]) -> dict[Path, Any]:
            named = unflatten_dict({_names(path): value for path, value in values.items()})
            module = self._merge(named, model_state, make_key, variant)
            args, kwargs = self._arguments(module, inputs, variant.training, make_key)
            with nn.intercept_methods(LinenCalls(variant.training).intercept), _may_sow():
                module(*args, **kwargs)
            return self._params_of(module)

        is_kept = is_passed_through(after_a_call, _pick(params, self._param_paths))
        written = [_joined(path) for path in self._param_paths if not is_kept[path]]
        if written:
            raise ValueError(
                f"In training, the call of {self.name} writes to its parameters {', '.join(written[:errors.MAX_ITEMS])}"
                ", as `nnx.SpectralNorm` and `nnx.WeightNorm` do. Only the optimizer changes parameters here: what the "
                "call writes would be lost, and a loop that keeps it would train other weights. Compute with a changed "
                "copy of the parameters, as Linen's layers do, and keep what a call computes in an `nnx.Variable`.")

    def _params_of(self, module: nnx.Module) -> dict[Path, Any]:
        return {path: value.get_value() for path, value in nnx.to_flat_state(nnx.state(module, nnx.Param))}

    def _arguments(self, module: Any, inputs: PyTree, training: bool,
                   make_key: MakeKey) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = call_arguments(module, inputs, training, make_key, self.call_kwargs.of(training))
        if isinstance(module, nnx.bridge.ToNNX):  # which changes no variables by default
            kwargs = {"mutable": DenyList(("params", INTERMEDIATES)), **kwargs}
        return args, kwargs

    def _changing(self, module: nnx.Module) -> dict[Path, Any]:
        """Returns the values that BatchNorm and random draws change: running means, and counts of random streams."""
        means = {(*layer, "mean") for layer in self._params_of_batch_norms}
        return {path: value.get_value() for path, value in nnx.to_flat_state(nnx.state(module))
                if path in means or isinstance(value, nnx.RngCount)}

    def _retrace_to_check(self, params: dict, model_state: dict, inputs: PyTree, variant: _Variant,
                          make_key: MakeKey, check: ModeCheck) -> None:
        """Calls the module once more, so that `check` sees each of its layers."""
        batch_norms = set(map(_names, self._params_of_batch_norms))

        def record(layer: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            path, given = "/".join(layer.to_nnx__path), inspect.signature(call).bind(layer, *args, **kwargs).arguments

            def flag(name: str) -> bool:
                return bool(getattr(layer, name) if given.get(name) is None else given[name])

            rate = layer.rate if isinstance(layer, nnx.Dropout) else (
                layer.dropout_rate if isinstance(layer, nnx.MultiHeadAttention) else 0)
            if layer.to_nnx__path in batch_norms:
                check.batch_norm(path, flag("use_running_average"), layer.is_frozen)
            if rate and not flag("deterministic"):
                check.dropout(path)
            with check.within(layer, given):
                return call(layer, *args, **kwargs)

        module = self._merge(params, model_state, make_key, variant)
        _hook_calls(module, record)
        args, kwargs = self._arguments(module, inputs, variant.training, make_key)
        with nn.intercept_methods(LinenCalls(variant.training).intercept), _may_sow():
            module(*args, **kwargs)

    def _is_frozen_in_linen(self, is_frozen: IsFrozen | None) -> IsFrozen | None:
        """Returns `is_frozen` for paths in modules that `nnx.bridge.ToNNX` wraps."""
        if is_frozen is None or not self._bridges:
            return None

        def is_frozen_in_linen(path: str) -> bool:
            frozen = {is_frozen(SEPARATOR.join(filter(None, (_joined(bridge), path)))) for bridge in self._bridges}
            if len(frozen) > 1:
                raise ValueError(f"`freeze` has {path!r} of one Linen module in NNX, but not of another. Freeze it in "
                                 "all of them, or in none.")
            return frozen.pop()

        return is_frozen_in_linen

    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into the user's module; its random streams and mode do not change."""
        values = {**_pick(params, self._param_paths), **_pick(model_state, self._state_paths)}
        nnx.update(self.module, nnx.from_flat_state({
            path: jax.device_put(value, may_alias=False) for path, value in values.items()}))

    def variable_identities(self) -> Iterable[int]:
        """See the base class. Random streams are not part of the state, so modules may share them."""
        return (id(node) for _, node in nnx.iter_graph(self.module)
                if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState))

    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        """See the base class. Lists and dicts of layers are left out, and uncalled layers come last."""
        held: dict[str, Any] = {_joined(path): layer for path, layer in nnx.iter_modules(self.module)
                                if not isinstance(layer, (nnx.List, nnx.Dict))}
        if isinstance(self.module, NNXStack):  # its functions are layers too
            held |= {f"layers/{index}": layer for index, layer in enumerate(self.module.layers)
                     if id(layer) not in map(id, held.values())}
            first = sorted((path for path in held if path.count(SEPARATOR) == 1), key=lambda path: int(path[7:]))
        else:
            first = []
        called = []
        if inputs is not None:
            recorder = CallRecorder(inputs)
            self.observe_calls(inputs, recorder)
            called = recorder.paths
        outer_first = [_joined(path[:end]) for path in called for end in range(len(path) + 1)]
        return [ModuleLayer(path, held[path]) for path in dict.fromkeys(["", *first, *outer_first, *sorted(held)])
                if path in held]

    @on_mesh_of_strategy()
    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        def record_call(layer: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            args, kwargs = observer.begin(layer.to_nnx__path, type(layer).__name__, (args, kwargs))
            return observer.end(layer.to_nnx__path, call(layer, *args, **kwargs))

        def record(params: dict, model_state: dict, batch: Any) -> Any:
            module = self._merge(params, model_state, lambda _: jax.random.key(0), _Variant(training=False))
            _hook_calls(module, record_call)
            args, kwargs = self._arguments(module, batch, False, lambda _: jax.random.key(0))
            with _may_sow():
                return module(*args, **kwargs)

        params, model_state = self._values(self._template)
        observer.trace(record, params, model_state, inputs)
        return params, [model_state]

    def _frozen(self, is_frozen: IsFrozen | None) -> frozenset[Path]:
        """Returns the paths of the frozen BatchNorm layers."""
        return frozenset(layer for layer, params in self._params_of_batch_norms.items()
                         if is_layer_frozen(_joined(layer), params, is_frozen))

    def _merge(self, params: dict, model_state: dict, make_key: MakeKey, variant: _Variant) -> nnx.Module:
        values = {**_pick(params, self._param_paths), **_pick(model_state, self._state_paths),
                  **{path: jnp.zeros(value.get_value().shape, value.get_value().dtype)
                     for path, value in self._losses.items()},
                  **{path: _fresh(path, variable, make_key) for path, variable in self._random.items()}}
        return nnx.merge(self._graphdef(variant), nnx.from_flat_state(values))

    def _graphdef(self, variant: _Variant) -> nnx.GraphDef:
        if variant not in self._graphdefs:
            # NNX allows changes of an object only at the trace level of its creation, and this may run at any level.
            module = nnx.clone(self._template)
            if variant.training:
                module.train()
            else:
                module.eval()
            set_nnx_policy(module, variant.batch_norm, variant.frozen)
            if variant.compute_dtype is not None:
                set_nnx_compute_dtype(module, variant.compute_dtype)
            self._graphdefs[variant] = nnx.graphdef(module)
        return self._graphdefs[variant]

    def _sown(self, module: nnx.Module) -> dict[str, dict]:
        """Returns the values sown in a call, by collection."""
        sown: dict[str, dict] = {}
        for path, value in dict(nnx.to_flat_state(nnx.state(module))).items():
            if _is_loss(value) or isinstance(value, nnx.Intermediate):
                sown.setdefault(LOSSES if _is_loss(value) else INTERMEDIATES, {})[_names(path)] = value.get_value()
        return {name: unflatten_dict(values) for name, values in sown.items()}

    def _values(self, module: nnx.Module) -> tuple[dict, dict]:
        """Returns `(params, model_state)` of a module with at least the variables of this module."""
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        params, model_state = ({_names(path): _value(variables[path]) for path in paths}
                               for paths in (self._param_paths, self._state_paths))
        return unflatten_dict(params), unflatten_dict(model_state)


def _abstract_clone(module: nnx.Module) -> nnx.Module:
    """Returns a clone with shapes for values, which neither keeps the user's arrays alive nor needs them."""
    graphdef, state = nnx.split(module)
    shapes = jax.eval_shape(lambda: state)
    clone = nnx.merge(graphdef, jax.tree.map(_without_memory, shapes,
                                             is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    nnx.pop(clone, lambda path, value: isinstance(value, nnx.Intermediate)
            or (_is_loss(value) and isinstance(value.get_value(), tuple)))
    replace_nnx_batch_norms(clone)
    return clone


def _without_memory(leaf: Any) -> Any:
    """Returns a variable unchanged, and a shape as an array without memory, as NNX finds no shapes in containers."""
    if isinstance(leaf, nnx.Variable) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


@contextlib.contextmanager
def _may_sow() -> Iterator[None]:
    """Silences NNX's warning about `sow` outside of `nnx.capture`, which would need the types of the sown values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using 'Module.sow\(\)' outside", DeprecationWarning)
        yield


def _is_loss(value: object) -> bool:
    # `self.sow("losses", ...)` creates a type of that name.
    return isinstance(value, nnx.Variable) and any(
        base.__name__.lower() in ("loss", "losses") for base in type(value).__mro__)


def _fresh(path: Path, variable: nnx.RngState, make_key: MakeKey) -> jax.Array:
    value = variable.get_value()
    if isinstance(variable, nnx.RngKey):
        # The last part of the path only marks the key of the stream.
        key = make_key("/".join(_names(path[:-1])))
        return jax.random.split(key, value.shape) if value.shape else key
    return jnp.zeros(value.shape, value.dtype)


def _pick(tree: Mapping[str, Any], paths: Iterable[Path]) -> dict[Path, Any]:
    return {path: functools.reduce(operator.getitem, _names(path), tree) for path in paths}


def _names(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _joined(path: Path) -> str:
    return SEPARATOR.join(_names(path))


def _value(leaf: object) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _hook_calls(module: nnx.Module, hook: Callable[..., Any]) -> None:
    """Makes each layer of a private clone call `hook(layer, call, args, kwargs)` in place of `call`, its `__call__`."""
    for path, layer in list(nnx.iter_modules(module)):
        if callable(layer):
            _hook_call(layer, _names(path), hook)


def _hook_call(layer: Any, path: tuple[str, ...], hook: Callable[..., Any]) -> None:
    # Attributes also reach the copies that NNX makes of a layer inside of its transformations. The prefix is needed:
    # `nnx.bridge.ToNNX` treats all other attributes as variables.
    layer.to_nnx__path = path
    layer.to_nnx__hook = hook
    object.__setattr__(layer, "__class__", _hooked_class(layer.__class__))


@functools.cache
def _hooked_class(layer_class: type[nnx.Module]) -> type[nnx.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.to_nnx__hook(self, layer_class.__call__, args, kwargs)

    return types.new_class(layer_class.__name__, (layer_class,),
                           exec_body=lambda body: body.update(__call__=functools.wraps(layer_class.__call__)(call)))


def _call_or_rematerialise(layer: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    def rematerialised() -> Any:
        # NNX must see its own objects. All other values stay as they are: flags, strings, None.
        objects, put_back = take_out((args, kwargs), lambda leaf: isinstance(leaf, (nnx.Pytree, nnx.Variable)))

        def call_again(layer: Any, *objects: Any) -> Any:
            args, kwargs = put_back(*objects)
            return call(layer, *args, **kwargs)

        return rematerialise(nnx.remat, call_again, layer, *objects)

    return call_layer(layer.to_nnx__path, lambda: call(layer, *args, **kwargs), rematerialised)
