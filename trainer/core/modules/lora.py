"""LoRA's adapters: two small matrices beside a layer's weight, which are trained while the weight is frozen.

A layer with the weight W computes `x W + factor * (x A) B`, so neither `A B` nor a gradient of W is ever an array. The
matrices are parameters of the layer, "lora_a" and "lora_b" beside "kernel": they follow it through scans, over devices
and into checkpoints. See Hu et al., "LoRA: Low-rank adaptation of large language models", 2021,
https://arxiv.org/abs/2106.09685.

Owns the sum and its matrices; `linen_lora.py` and `nnx_lora.py` put them into layers. It must not know Linen or NNX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from trainer.core import tree_paths
from trainer.core.modules.base import FunctionalModule, IsFrozen
from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.delegating import DelegatingFunctional
from trainer.core.modules.remat_policies import Remat
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import PyTree

A, B = "lora_a", "lora_b"
KERNEL, EMBEDDING = "kernel", "embedding"
_NO_MATRICES = ("bias", "scale")
_LAYERS = "Dense, DenseGeneral and Embed of Linen, or Linear, LinearGeneral and Embed of NNX"


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The checked arguments of `trainer.lora`, which documents them.

    Attributes:
      targets: patterns of weights; None for the kernels of all linear layers.
      train: patterns of further parameters that are trained.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0
    train: tuple[str, ...] = ()

    @property
    def factor(self) -> float:
        """The factor of the product of the matrices."""
        return self.alpha / self.rank

    @property
    def trained_only(self) -> tuple[str, ...]:
        """Patterns of all parameters that are trained."""
        return (f"**/{A}$", f"**/{B}$", *self.train)

    def selects(self, path: str) -> bool:
        """Returns whether the weight of a path gets an adapter, if its layer can have any."""
        if self.targets is None:
            return path.rpartition(SEPARATOR)[2] == KERNEL
        return tree_paths.matches_any(self.targets, path)


class AdaptedLayer(NamedTuple):
    """The adapter of a layer.

    Attributes:
      weight: the name of the layer's weight, `KERNEL` or `EMBEDDING`.
      inputs: the shape of a row of inputs; the number of rows of an embedding.
      outputs: the shape of a row of outputs.
    """

    weight: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def shapes(self, rank: int, stacked: Sequence[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the two matrices, below the axes of a stack of layers."""
        return (*stacked, *self.inputs, rank), (*stacked, rank, *self.outputs)

    def first(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Returns the first A: uniform up to `1 / sqrt(inputs)`, and zeros for an embedding, as in PEFT."""
        if self.weight == EMBEDDING:
            return jnp.zeros(shape, dtype)
        limit = 1 / math.sqrt(math.prod(self.inputs))
        return jax.random.uniform(key, tuple(shape), dtype, -limit, limit)

    def second(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Returns the first B: zeros, and normal for an embedding, so that the first product is zero."""
        return jax.random.normal(key, tuple(shape), dtype) if self.weight == EMBEDDING else jnp.zeros(shape, dtype)

    def merged(self, weight: jax.Array, a: jax.Array, b: jax.Array, factor: float) -> jax.Array:
        """Returns the weight that computes the same as the weight and its adapter, in the weight's dtype."""
        stacked, rank = weight.shape[:weight.ndim - len(self.inputs) - len(self.outputs)], a.shape[-1]
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        a = a.reshape(*stacked, -1, rank).astype(wide)
        product = jnp.matmul(a, b.reshape(*stacked, rank, -1).astype(wide), precision=lax.Precision.HIGHEST)
        return (weight.astype(wide) + factor * product.reshape(weight.shape)).astype(weight.dtype)


def adapter_dtype(weight: Any) -> Any:
    """Returns the dtype of the matrices for a weight: at least float32, as updates of 16-bit weights would vanish."""
    return jnp.promote_types(weight.dtype, jnp.float32)


def with_product(
    outputs: jax.Array, inputs: jax.Array, a: jax.Array, b: jax.Array, factor: float, axes: Sequence[int] = (-1,)
) -> jax.Array:
    """Returns a linear layer's outputs with the adapter's added, in the dtype of the outputs.

    Args:
      outputs: the outputs.
      inputs: the inputs, after dropout.
      a: the first matrix; its axes but the last are the axes of the inputs that the layer sums over.
      b: the second matrix.
      factor: factor of the product.
      axes: the axes of the inputs that the layer sums over.

    >>> with_product(jnp.ones((1, 3)), jnp.ones((1, 2)), jnp.ones((2, 4)), jnp.ones((4, 3)), 0.5).tolist()
    [[5.0, 5.0, 5.0]]
    """
    inputs, a, b = (jnp.asarray(value, outputs.dtype) for value in (inputs, a, b))
    summed = tuple(axis % inputs.ndim for axis in axes)
    low = lax.dot_general(inputs, a, ((summed, tuple(range(len(summed)))), ((), ())))
    return outputs + factor * lax.dot_general(low, b, (((low.ndim - 1,), (0,)), ((), ())))


def with_rows(outputs: jax.Array, ids: jax.Array, a: jax.Array, b: jax.Array, factor: float) -> jax.Array:
    """Returns the outputs of an embedding with the adapter's added."""
    return outputs + factor * jnp.take(a.astype(outputs.dtype), ids, axis=0) @ b.astype(outputs.dtype)


def with_scores(outputs: jax.Array, query: jax.Array, a: jax.Array, b: jax.Array, factor: float) -> jax.Array:
    """Returns the scores of a query against all rows of an embedding with the adapter's added."""
    query, a, b = (jnp.asarray(value, outputs.dtype) for value in (query, a, b))
    return outputs + factor * (query @ b.T) @ a.T


class BaseValues(NamedTuple):
    """The values of a model that is adapted; as `initial_values` of `AdaptedFunctional.init`."""

    params: Any
    model_state: Any


class AdaptedFunctional(DelegatingFunctional):
    """A module with adapters.

    Args:
      owner: the functional form of the module.
      adapters: the adapters.

    Attributes:
      plain: the functional form of the module without adapters.
      adapters: the adapters.
      layers_by_path: the layers that have adapters; known after initialization.
    """

    def __init__(self, owner: FunctionalModule, plain: FunctionalModule, adapters: Adapters):
        super().__init__(owner)
        self.plain = plain
        self.adapters = adapters
        self.layers_by_path: dict[str, AdaptedLayer] = {}

    @property
    def trained_only(self) -> tuple[str, ...]:
        return self.adapters.trained_only

    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        return self._owner.apply(
            params, model_state, inputs, training=training, make_key=make_key, batch_norm=batch_norm, remat=remat,
            compute_dtype=compute_dtype, is_frozen=is_frozen)

    def check_params(self, params: PyTree) -> None:
        """Raises ValueError for a stack of layers whose axis is not the first, which `merged` would not understand."""
        leaves = tree_paths.named_leaves(params)
        for path, layer in self.layers_by_path.items():
            weight, a, b = (leaves[each] for each in self._paths(path, layer))
            stacked = weight.shape[:len(weight.shape) - len(layer.inputs) - len(layer.outputs)]
            if (a.shape, b.shape) != layer.shapes(self.adapters.rank, stacked) or (
                    weight.shape != (*stacked, *layer.inputs, *layer.outputs)):
                raise ValueError(f"LoRA adapts stacks of layers whose axis is the first. Received: {path!r} of shape "
                                 f"{weight.shape}, where each layer's is {(*layer.inputs, *layer.outputs)}. Give the "
                                 "scan `variable_axes={\"params\": 0}`.")

    def _paths(self, path: str, layer: AdaptedLayer) -> Iterator[str]:
        return (SEPARATOR.join(filter(None, (path, name))) for name in (layer.weight, A, B))

    def merged(self, params: PyTree) -> dict:
        """Returns the parameters of `plain` that compute the same."""
        leaves, merged = tree_paths.named_leaves(params), {}
        for path, layer in self.layers_by_path.items():
            weight, a, b = self._paths(path, layer)
            merged[weight] = layer.merged(leaves[weight], leaves[a], leaves[b], self.adapters.factor)
        names = {path: name for path in leaves if (name := path.rpartition(SEPARATOR)[2])}
        base = tree_paths.kept(params, lambda path: names[path] not in (A, B))
        return tree_paths.updated(base, unflattened(merged))


def unflattened(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts of leaves given by their paths.

    >>> unflattened({"up/kernel": 1, "up/bias": 2})
    {'up': {'kernel': 1, 'bias': 2}}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split(SEPARATOR)
        below = tree
        for part in above:
            below = below.setdefault(part, {})
        below[name] = leaf
    return tree


def check_targets(adapters: Adapters, adaptable: Iterable[str], params: PyTree) -> None:
    """Raises ValueError if a pattern matches nothing, or a weight of a layer that cannot have an adapter.

    Args:
      adapters: the adapters.
      adaptable: the paths of all weights that can have adapters.
      params: all parameters.
    """
    adaptable = list(adaptable)
    leaves = {path: leaf for path, leaf in tree_paths.named_leaves(params).items()
              if path.rpartition(SEPARATOR)[2] not in (A, B)}
    tree_paths.check_patterns("train", adapters.train, leaves)
    if adapters.targets is None:
        if not adaptable:
            raise ValueError(f"The module has no linear layers, so LoRA has nothing to adapt. It knows {_LAYERS}.")
        return
    for path, leaf in leaves.items():
        if (adapters.selects(path) and path not in adaptable and leaf.ndim > 1
                and path.rpartition(SEPARATOR)[2] not in _NO_MATRICES):
            raise ValueError(f"`targets` selects {path!r}, a weight of shape {leaf.shape} of a layer that LoRA does "
                             f"not know: it adapts {_LAYERS}. Give patterns of such layers only; `train` takes "
                             "further parameters to be trained as they are.")
    tree_paths.check_patterns("targets", adapters.targets, adaptable)
