"""Adafactor's factored estimates of gradient sizes, with Keras's numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class FactoredState(NamedTuple):
    """Running means of squared gradients. Trees like the parameters, with scalar zeros where they do not apply.

    Attributes:
      count: number of updates, an int32 scalar.
      rows: means over the last axis, for arrays of two or more axes.
      columns: means over the second-to-last axis, for the same arrays.
      squares: running means of the squares themselves, for other arrays.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    rows: Tree
    columns: Tree
    squares: Tree


def descend_factored(
    beta_2_decay: float, epsilon_1: float, epsilon_2: float, clip_threshold: float
) -> optax.GradientTransformationExtraArgs:
    """Steps against the gradient, divided by its estimated size and scaled to the size of the weights.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, algorithm 4.
    """

    def init(params: Tree) -> FactoredState:
        def zeros(of_factored: bool, shape: Any) -> Tree:
            return jax.tree.map(
                lambda param: jnp.zeros(shape(param.shape) if (param.ndim > 1) == of_factored else (), param.dtype),
                params)

        return FactoredState(jnp.zeros((), jnp.int32), zeros(True, lambda shape: shape[:-1]),
                             zeros(True, lambda shape: (*shape[:-2], shape[-1])), zeros(False, lambda shape: shape))

    def update(
        grads: Tree, state: FactoredState, params: Tree, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, FactoredState]:
        count = optax.safe_increment(state.count)
        step = count.astype(jnp.float32)
        rate, beta = jnp.minimum(learning_rate, 1 / jnp.sqrt(step)), 1 - step**beta_2_decay

        def mean(before: jax.Array, values: jax.Array) -> jax.Array:
            return (beta * before + (1 - beta) * values).astype(before.dtype)

        def of_leaf(grad: jax.Array, param: jax.Array, rows: jax.Array, columns: jax.Array, squares: jax.Array) -> Any:
            square = jnp.square(grad) + epsilon_1
            if param.ndim > 1:
                rows, columns = mean(rows, square.mean(-1)), mean(columns, square.mean(-2))
                scale = (rows / rows.mean(-1, keepdims=True))[..., None] * columns[..., None, :]
            else:
                scale = squares = mean(squares, square)
            direction = grad / jnp.sqrt(scale)
            direction = direction / jnp.maximum(1.0, _rms(direction) / clip_threshold)
            moved = -rate * jnp.maximum(epsilon_2, _rms(param)) * direction
            return moved.astype(param.dtype), rows, columns, squares

        structure = jax.tree.structure(grads)
        leaves = map(jax.tree.leaves, (grads, params, state.rows, state.columns, state.squares))
        found = [of_leaf(*each) for each in zip(*leaves, strict=True)]
        moved, *kept = (jax.tree.unflatten(structure, [each[part] for each in found]) for part in range(4))
        return moved, FactoredState(count, *kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _rms(values: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(values)))
