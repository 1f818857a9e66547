"""Logits of a last dense layer that the loss computes, a few positions at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments, errors
from trainer.core.types import PyTree


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["features", "kernel"], meta_fields=["chunk_size", "compute_dtype"])
@dataclasses.dataclass(frozen=True)
class LinearLogits:
    """The logits `features @ kernel`, which are not computed yet.

    A module may return them in training instead of logits. `SparseCategoricalCrossentropy(from_logits=True)` then
    computes the logits of `chunk_size` positions at a time, and again in the backward pass, so that the logits of a
    batch are never in memory together: 8 rows of 1,024 tokens and 50,257 classes would take 1.6 GB in float32. Other
    losses, metrics, `predict` and functions of `jax.numpy` compute all logits; operators and indices need `array()`.

    Attributes:
      features: array of shape `(rows, ..., positions, features)`.
      kernel: array of shape `(features, classes)`, such as a transposed table of embeddings.
      chunk_size: maximum number of positions per chunk.
      compute_dtype: dtype of the factors of products, which are summed in at least float32; the dtype of the features
        by default.

    Raises:
      TypeError: if an argument has a wrong type.
      ValueError: if the shapes do not match, the features have no axis of positions, or `chunk_size` is below 1.

    Example:

    >>> logits = LinearLogits(jnp.ones((2, 6, 4)), jnp.ones((4, 10)), chunk_size=2)
    >>> logits.shape, jnp.argmax(logits, axis=-1).shape
    ((2, 6, 10), (2, 6))

    In a module:

    >>> from flax import linen as nn
    >>> class LanguageModel(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, tokens, training=False):
    ...         embed = nn.Embed(50, 8)
    ...         x = embed(tokens)
    ...         logits = LinearLogits(x, embed.embedding.T, chunk_size=16)
    ...         return logits if training else logits.array()
    """

    features: jax.Array
    kernel: jax.Array
    chunk_size: int
    compute_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        arguments.check_count("chunk_size", self.chunk_size)
        for name in ("features", "kernel"):
            dtype = getattr(getattr(self, name), "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise errors.wrong_type(name, getattr(self, name), "an array of floats")
        # A policy of mixed precision casts the outputs of a module.
        dtype = self.features.dtype if self.compute_dtype is None else self.compute_dtype
        object.__setattr__(self, "compute_dtype", arguments.as_dtype("compute_dtype", dtype))
        features, kernel = tuple(self.features.shape), tuple(self.kernel.shape)
        if len(features) < 3 or len(kernel) != 2 or features[-1] != kernel[0]:
            raise ValueError("LinearLogits takes features of shape (rows, positions, features), and a kernel of shape "
                             f"(features, classes). Received: shapes {features} and {kernel}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits: `(rows, ..., positions, classes)`."""
        return *self.features.shape[:-1], self.kernel.shape[1]

    @property
    def ndim(self) -> int:
        """The number of axes of the logits."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the logits: float32 or wider."""
        return np.dtype(jnp.promote_types(self.features.dtype, jnp.float32))

    def array(self) -> jax.Array:
        """Returns all logits."""
        return linear_logits(self.features.astype(self.compute_dtype), self.kernel)

    def __jax_array__(self) -> jax.Array:
        return self.array()

    def map_chunks(self, function: Callable[[jax.Array, jax.Array], jax.Array], labels: jax.Array) -> jax.Array:
        """Returns `function(labels, logits)`, of the shape of the labels, a chunk of positions at a time.

        Args:
          function: a function within each position.
          labels: array of shape `(rows, ..., positions)`.
        """
        positions = labels.shape[-1]
        chunks = -(-positions // self.chunk_size)
        size = -(-positions // chunks)

        def divided(array: jax.Array, axis: int) -> jax.Array:
            padding = [(0, 0)] * array.ndim
            padding[axis] = (0, chunks * size - positions)
            parts = jnp.pad(array, padding).reshape(*array.shape[:axis], chunks, size, *array.shape[axis + 1:])
            return jnp.moveaxis(parts, axis, 0)

        @jax.checkpoint
        def one_chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            return function(part[0], linear_logits(part[1].astype(self.compute_dtype), kernel))

        kernel = self.kernel.astype(self.dtype)  # the dtype in which the chunks' gradients are added
        axis = labels.ndim - 1
        values = jax.lax.map(one_chunk, (divided(labels, axis), divided(self.features, axis)))
        return jnp.moveaxis(values, 0, axis).reshape(*labels.shape[:-1], chunks * size)[..., :positions]


@jax.custom_vjp
def linear_logits(features: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `features @ kernel`, multiplied in the dtype of the features and summed in float32 or wider.

    Sums in at least float32: a loss exponentiates the rounding errors of a narrower sum. The products of the gradients
    are of the features' dtype too, as in mixed precision elsewhere: without this rule, JAX multiplies in float32.
    """
    wide = jnp.promote_types(features.dtype, jnp.float32)
    return jnp.dot(features, kernel.astype(features.dtype), preferred_element_type=wide)


def _forward(features: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear_logits(features, kernel), (features, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    features, kernel = saved
    _, transposed = jax.vjp(jnp.dot, features, kernel.astype(features.dtype))
    of_features, of_kernel = transposed(gradient.astype(features.dtype))
    return of_features, of_kernel.astype(kernel.dtype)


linear_logits.defvjp(_forward, _backward)


def leaves_of(outputs: PyTree) -> list[Any]:
    """Returns the outputs of a module as a list, in which `LinearLogits` are a single output."""
    return jax.tree.leaves(outputs, is_leaf=_is_linear)


def computed(outputs: PyTree) -> Any:
    """Returns the outputs of a module with `LinearLogits` replaced by all logits."""
    return jax.tree.map(lambda leaf: leaf.array() if _is_linear(leaf) else leaf, outputs, is_leaf=_is_linear)


def with_shapes(outputs: PyTree) -> Any:
    """Returns the outputs of a module with `LinearLogits` replaced by their shape, a single leaf."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_linear(leaf) else leaf,
                        outputs, is_leaf=_is_linear)


def _is_linear(value: object) -> bool:
    return isinstance(value, LinearLogits)
