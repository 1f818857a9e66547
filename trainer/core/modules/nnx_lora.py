"""LoRA's adapters in the layers of an NNX module: a private clone gets them, and the user's object stays as it is."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.core.modules import lora
from trainer.core.modules.base import key_for
from trainer.core.modules.lora import AdaptedFunctional, AdaptedLayer, Adapters, BaseValues, unflattened
from trainer.core.modules.nnx import NNXFunctional
from trainer.core.tree_paths import SEPARATOR, named_leaves, updated
from trainer.core.types import PyTree


class AdaptedNNX(AdaptedFunctional):
    """An NNX module with adapters. Its `nnx.LoRAParam` variables are "lora_a" and "lora_b" of the adapted layers.

    Raises:
      ValueError: a pattern matches nothing, or a weight of a layer that cannot have an adapter; or `dropout` is given
        for a stack of layers.
    """

    def __init__(self, plain: NNXFunctional, adapters: Adapters):
        clone = nnx.clone(plain.module)
        layers = {SEPARATOR.join(map(str, path)): layer for path, layer in nnx.iter_modules(clone)}
        known = {path: layer for path, module in layers.items() if (layer := _layer(module)) is not None}
        weights = {SEPARATOR.join(filter(None, (path, layer.weight))): path for path, layer in known.items()}
        params = plain.initial_values[0]
        lora.check_targets(adapters, weights, params)
        chosen = {path: known[path] for weight, path in weights.items() if adapters.selects(weight)}
        self._shapes: dict[str, jax.ShapeDtypeStruct] = {}
        for path, layer in chosen.items():
            self._adapt(path, layers[path], layer, adapters)
        super().__init__(NNXFunctional(clone, plain.call_kwargs), plain, adapters)
        self.layers_by_path = chosen

    def _adapt(self, path: str, module: Any, layer: AdaptedLayer, adapters: Adapters) -> None:
        weight = getattr(module, layer.weight)
        stacked = weight.shape[:len(weight.shape) - len(layer.inputs) - len(layer.outputs)]
        if stacked and adapters.dropout:
            raise ValueError(f"`dropout` needs a random stream in each layer, and {path!r} is a stack of layers "
                             f"of shape {stacked}, whose transformation does not split it. Leave `dropout` out.")
        for name, shape in zip((lora.A, lora.B), layer.shapes(adapters.rank, stacked), strict=True):
            zeros = jnp.zeros(shape, lora.adapter_dtype(weight))
            self._shapes[SEPARATOR.join(filter(None, (path, name)))] = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)
            setattr(module, name, nnx.LoRAParam(zeros))
        module.lora_factor = adapters.factor
        if adapters.dropout and layer.weight == lora.KERNEL:
            module.lora_dropout = nnx.Dropout(adapters.dropout, rngs=nnx.Rngs(0))
        layer_class: Any = type(module)
        object.__setattr__(module, "__class__", _adapted_class(layer_class))

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class. With `BaseValues`, all parameters and state but adapters are copies of these."""
        if isinstance(initial_values, BaseValues):
            zeros = unflattened({path: jnp.zeros(each.shape, each.dtype) for path, each in self._shapes.items()})
            initial_values = (_joined(initial_values.params, zeros), initial_values.model_state)
        params, model_state, outputs = self._owner.init(key, inputs, initial_values)
        drawn = {}
        for path, layer in self.layers_by_path.items():
            for name, draw in ((lora.A, layer.first), (lora.B, layer.second)):
                where = SEPARATOR.join(filter(None, (path, name)))
                drawn[where] = draw(key_for(key, where), self._shapes[where].shape, self._shapes[where].dtype)
        return updated(params, unflattened(drawn)), model_state, outputs


def _joined(tree: PyTree, other: PyTree) -> dict[str, Any]:
    """Returns nested dicts with the leaves of both."""
    return unflattened({**named_leaves(tree), **named_leaves(other)})


def _layer(module: Any) -> AdaptedLayer | None:
    """Returns the adapter that a layer can have; None if it can have none."""
    if _has_method_of(module, nnx.Embed):
        layer = AdaptedLayer(lora.EMBEDDING, (module.num_embeddings,), (module.features,))
        if module.num_embeddings == 1:
            return None
    elif _has_method_of(module, nnx.Linear):
        layer = AdaptedLayer(lora.KERNEL, (module.in_features,), (module.out_features,))
    elif _has_method_of(module, nnx.LinearGeneral) and not module.batch_axis:
        layer = AdaptedLayer(lora.KERNEL, tuple(module.in_features), tuple(module.out_features))
    else:
        return None
    shape = getattr(module, layer.weight).shape
    # A stack of layers has its axes first. Others could not be told apart from the layer's own.
    expected = layer.inputs + layer.outputs
    return layer if shape[len(shape) - len(expected):] == expected else None


def _has_method_of(module: object, kind: type[Any]) -> bool:
    return isinstance(module, kind) and type(module).__call__ is kind.__call__


# A single replacement per class: NNX compares graph definitions by class.


@functools.cache
def _adapted_class(layer_class: Any) -> Any:
    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = layer_class.__call__(self, inputs, *args, **kwargs)
        a, b, factor = self.lora_a[...], self.lora_b[...], self.lora_factor
        if isinstance(self, nnx.Embed):
            return lora.with_rows(outputs, inputs, a, b, factor)
        if hasattr(self, "lora_dropout"):
            inputs = self.lora_dropout(inputs)
        axes = self.axis if isinstance(self, nnx.LinearGeneral) else (-1,)
        return lora.with_product(outputs, inputs, a, b, factor, axes)

    def attend(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = layer_class.attend(self, query, *args, **kwargs)
        return lora.with_scores(outputs, query, self.lora_a[...], self.lora_b[...], self.lora_factor)

    methods: dict[str, Any] = {"__call__": functools.wraps(layer_class.__call__)(call)}
    if issubclass(layer_class, nnx.Embed):
        methods["attend"] = functools.wraps(layer_class.attend)(attend)
    return types.new_class(layer_class.__name__, (layer_class,), exec_body=lambda body: body.update(methods))
