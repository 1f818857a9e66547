"""Passes flags, BatchNorm policy, compute dtype and rematerialization to a Linen module's layers.

Owns the method interceptor, and the replacement of `has_rng` that requests streams. It also covers modules that
`nnx.bridge.ToNNX` wraps. It must not know NNX, except for the modules that `nnx.bridge.ToLinen` makes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import linen as nn

from trainer.core.modules.base import IsFrozen
from trainer.core.modules.batch_norm import (
    call_linen_batch_norm,
    call_with_running_averages,
    is_layer_frozen,
    is_linen_batch_norm,
)
from trainer.core.modules.calling.call_arguments import FLAGS
from trainer.core.modules.calling.mode_check import ModeCheck
from trainer.core.modules.compute_dtype import call_linen_layer
from trainer.core.modules.remat import call_layer, rematerialise, take_out
from trainer.core.tree_paths import SEPARATOR, named_leaves

Context = nn.module.InterceptorContext

_NESTED_FLAGS = ("deterministic", "use_running_average")


class StreamWanted(Exception):
    """A module asks with `has_rng` for a random stream that it lacks.

    Attributes:
      name: name of the stream.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True)
class LinenCalls:
    """Intercepts the calls of a Linen module's layers.

    Attributes:
      training: whether the calls are part of training.
      batch_norm: as in `FunctionalModule.apply`.
      compute_dtype: as in `FunctionalModule.apply`.
      is_frozen: as in `FunctionalModule.apply`.
      check: checks for layers in the wrong phase; None to skip the checks.
      streams: names of the available random streams; None if `has_rng` cannot request more.
    """

    training: bool
    batch_norm: str = "global"
    compute_dtype: Any = None
    is_frozen: IsFrozen | None = None
    check: ModeCheck | None = None
    streams: Sequence[str] | None = None

    def intercept(self, next_call: Callable, args: tuple, kwargs: dict, context: Context) -> Any:
        """The interceptor for `nn.intercept_methods`."""
        module = context.module
        if module.scope is not None:
            # `has_rng` cannot be intercepted: it becomes an attribute of the clone that Flax bound for this call.
            object.__setattr__(module, "has_rng", functools.partial(self._has_rng, module))
        call = functools.partial(self._call_or_rematerialise, next_call, context)
        with self._wrapped_nnx(module):
            return call_linen_layer(module, call, args, kwargs, self.compute_dtype)

    def _call_or_rematerialise(self, next_call: Callable, context: Context, /, *args: Any, **kwargs: Any) -> Any:
        if context.method_name != "__call__":
            return next_call(*args, **kwargs)
        module = context.module
        return call_layer(module.path, lambda: self._call_in_phase(next_call, args, kwargs, context),
                          lambda: _rematerialised(module, args, kwargs))

    def _call_in_phase(self, next_call: Callable, args: tuple, kwargs: dict, context: Context) -> Any:
        module, signature = context.module, inspect.signature(context.orig_method)
        bound = signature.bind(*args, **kwargs)
        for name in _NESTED_FLAGS:
            parameter = signature.parameters.get(name)
            if (parameter is not None and bound.arguments.get(name, parameter.default) is None
                    and getattr(module, name, None) is None):
                bound.arguments[name] = self.training if FLAGS[name] else not self.training
        if isinstance(module, nn.BatchNorm) and is_linen_batch_norm(context):
            return self._normalize(module, next_call, bound)
        if self.check is None:
            return next_call(*bound.args, **bound.kwargs)
        if isinstance(module, nn.Dropout) and module.rate and not _given(module, bound, "deterministic"):
            self.check.dropout(SEPARATOR.join(module.path))
        with self.check.within(module, bound.arguments):
            return next_call(*bound.args, **bound.kwargs)

    def _normalize(self, module: nn.BatchNorm, next_call: Callable, bound: inspect.BoundArguments) -> Any:
        uses_running_average = bool(_given(module, bound, "use_running_average"))
        is_frozen = self.training and _is_frozen(module, self.is_frozen)
        if self.check is not None:
            self.check.batch_norm(SEPARATOR.join(module.path), uses_running_average, is_frozen)
        if uses_running_average or module.is_initializing():
            return next_call(*bound.args, **bound.kwargs)
        if is_frozen:
            return call_with_running_averages(module, next_call, bound.arguments["x"])
        return call_linen_batch_norm(module, next_call, bound.arguments["x"], bound.arguments.get("mask"),
                                     self.batch_norm)

    def _has_rng(self, module: nn.Module, name: str) -> bool:
        assert module.scope is not None
        if module.is_initializing() or name == "params":
            return module.scope.has_rng(name)
        if not self.training:
            return False
        if self.streams is not None and name not in self.streams:
            raise StreamWanted(name)
        return module.scope.has_rng(name)

    @contextlib.contextmanager
    def _wrapped_nnx(self, module: nn.Module) -> Iterator[None]:
        """Gives an `nnx.bridge.ToLinen` a stream for its `nnx.Rngs`, and prepares the NNX module that it makes."""
        nnx_class = vars(module).get("nnx_class")
        if nnx_class is None or module.scope is None:
            yield
            return
        if self.streams is not None and "default" not in self.streams and not module.skip_rng:
            raise StreamWanted("default")
        # Not at the top: `flax.nnx` would take a large part of the trainer's import time.
        from trainer.core.modules.nnx_batch_norm import (
            params_of_nnx_batch_norms,
            replace_nnx_batch_norms,
            set_nnx_policy,
        )

        def make(*args: Any, **kwargs: Any) -> Any:
            made = nnx_class(*args, **kwargs)
            if not self.training:
                made.eval()
            replace_nnx_batch_norms(made)
            frozen = [path for path, names in params_of_nnx_batch_norms(made).items()
                      if self.training and is_layer_frozen(joined(path), map(joined, names), self.is_frozen)]
            set_nnx_policy(made, self.batch_norm, frozen)
            return made

        def joined(path: tuple[Any, ...]) -> str:
            return SEPARATOR.join((*module.path, *map(str, path)))

        # On the clone that Flax bound, and only for the call: Flax also looks up methods of the class there.
        object.__setattr__(module, "nnx_class", make)
        try:
            yield
        finally:
            object.__setattr__(module, "nnx_class", nnx_class)


def holds_configured_batch_norm(module: object) -> bool:
    """Returns whether a field of the module, also a nested field, is a BatchNorm layer that uses running averages."""
    if isinstance(module, (list, tuple)):
        return any(map(holds_configured_batch_norm, module))
    if isinstance(module, dict):
        return any(map(holds_configured_batch_norm, module.values()))
    if not isinstance(module, nn.Module):
        return False
    if isinstance(module, nn.BatchNorm) and module.use_running_average:
        return True
    return any(holds_configured_batch_norm(getattr(module, field.name, None)) for field in dataclasses.fields(module)
               if field.name != "parent")


def _given(module: nn.Module, bound: inspect.BoundArguments, flag: str) -> Any:
    given = bound.arguments.get(flag)
    return getattr(module, flag, None) if given is None else given


def _is_frozen(layer: nn.Module, is_frozen: IsFrozen | None) -> bool:
    path = SEPARATOR.join(layer.path)
    params = named_leaves(layer.variables.get("params", {}))
    return is_layer_frozen(path, [SEPARATOR.join((*layer.path, name)) for name in params], is_frozen)


def _rematerialised(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Flax must see values that are bound to variables. All other values stay as they are: flags, strings, None.
    bound, put_back = take_out((args, kwargs), lambda leaf: (isinstance(leaf, (nn.Module, nn.Variable))
                                                             and leaf.scope is not None))

    def call_again(module: nn.Module, *bound: Any) -> Any:
        args, kwargs = put_back(*bound)
        return module(*args, **kwargs)  # returns to the interceptor, which now makes a plain call

    return rematerialise(nn.remat, call_again, module, *bound)
