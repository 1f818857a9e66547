"""LoRA's adapters in the layers of a Linen module, whose code stays as it is: an interceptor adds to their outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.core.modules import lora
from trainer.core.modules.linen import LinenFunctional
from trainer.core.modules.lora import AdaptedFunctional, AdaptedLayer, Adapters, BaseValues
from trainer.core.tree_paths import SEPARATOR, updated
from trainer.core.types import PyTree

_DROPOUT = "dropout"  # the stream that a scan over layers usually splits


class AdaptedLinen(AdaptedFunctional):
    """A Linen module with adapters."""

    def __init__(self, plain: LinenFunctional, adapters: Adapters):
        self._known: dict[str, AdaptedLayer] = {}  # all layers that can have adapters
        # No function of its own: a deep copy would share it, and with it `_known`.
        owner = LinenFunctional(plain.module, plain.call_kwargs, functools.partial(_interceptor, adapters, self._known))
        super().__init__(owner, plain, adapters)

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class. With `BaseValues`, all parameters and state but adapters are copies of these."""
        params, model_state, outputs = self._owner.init(key, inputs)
        self.layers_by_path = {path: layer for weight, (path, layer) in self._weights().items()
                               if self.adapters.selects(weight)}
        if isinstance(initial_values, BaseValues):
            params, model_state = (updated(made, jax.tree.map(jnp.copy, given))
                                   for made, given in zip((params, model_state), initial_values, strict=True))
        return params, model_state, outputs

    def check_params(self, params: PyTree) -> None:
        """Raises ValueError if a pattern matches nothing, or a weight of a layer that cannot have an adapter."""
        lora.check_targets(self.adapters, self._weights(), params)
        super().check_params(params)

    def _weights(self) -> dict[str, tuple[str, AdaptedLayer]]:
        return {SEPARATOR.join(filter(None, (path, layer.weight))): (path, layer)
                for path, layer in self._known.items()}


def _interceptor(adapters: Adapters, known: dict[str, AdaptedLayer], training: bool) -> Callable[..., Any]:
    return _Calls(adapters, training, known).intercept


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Adds the products of adapters to the outputs of layers, and makes them while a module is initialized.

    Attributes:
      adapters: the adapters.
      training: whether dropout is active.
      known: receives all layers that can have adapters, by path.
    """

    adapters: Adapters
    training: bool
    known: dict[str, AdaptedLayer]

    def intercept(self, next_call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """The interceptor for `nn.intercept_methods`."""
        outputs = next_call(*args, **kwargs)
        module, scope = context.module, context.module.scope
        method = context.method_name
        if scope is None or method not in ("__call__", "attend") or not (args or kwargs):
            return outputs
        inputs = args[0] if args else next(iter(kwargs.values()))
        if method == "__call__" and module.is_initializing():
            self._make(module, inputs)
        if not scope.has_variable("params", lora.A) or _kind(module, method) is None:
            return outputs
        a, b = (nn.meta.unbox(scope.get_variable("params", name)) for name in (lora.A, lora.B))
        factor = self.adapters.factor
        if isinstance(module, nn.Embed):
            return (lora.with_rows if method == "__call__" else lora.with_scores)(outputs, inputs, a, b, factor)
        if self.training and self.adapters.dropout:
            kept = jax.random.bernoulli(module.make_rng(_DROPOUT), 1 - self.adapters.dropout, jnp.shape(inputs))
            inputs = jnp.where(kept, inputs / (1 - self.adapters.dropout), 0)
        return lora.with_product(outputs, inputs, a, b, factor, _axes(module))

    def _make(self, module: nn.Module, inputs: Any) -> None:
        layer = _layer(module, inputs)
        scope = module.scope
        if layer is None or scope is None or not scope.has_variable("params", layer.weight):
            return
        path = SEPARATOR.join(module.path)
        self.known[path] = layer
        if (self.adapters.selects(SEPARATOR.join((*module.path, layer.weight)))
                and not scope.has_variable("params", lora.A)):
            dtype = lora.adapter_dtype(nn.meta.unbox(scope.get_variable("params", layer.weight)))
            first, second = layer.shapes(self.adapters.rank)
            scope.param(lora.A, layer.first, first, dtype)
            scope.param(lora.B, layer.second, second, dtype)


def _kind(module: nn.Module, method: str) -> type[nn.Module] | None:
    """Returns the class of Flax whose method a layer has; None for others, and for other methods of subclasses."""
    for kind in (nn.Dense, nn.DenseGeneral, nn.Embed):
        if isinstance(module, kind) and getattr(type(module), method, None) is getattr(kind, method, module):
            return kind
    return None


def _axes(module: Any) -> tuple[int, ...]:
    axes = getattr(module, "axis", -1)
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _layer(module: Any, inputs: Any) -> AdaptedLayer | None:
    """Returns the adapter that a layer can have; None if it can have none."""
    kind = _kind(module, "__call__")
    if kind is nn.Embed:
        return None if module.num_embeddings == 1 else AdaptedLayer(
            lora.EMBEDDING, (module.num_embeddings,), (module.features,))
    if kind is None or (kind is nn.DenseGeneral and module.batch_dims):
        return None
    features = (module.features,) if isinstance(module.features, int) else tuple(module.features)
    return AdaptedLayer(lora.KERNEL, tuple(jnp.shape(inputs)[axis] for axis in _axes(module)), features)
