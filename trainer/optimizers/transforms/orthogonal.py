"""Muon's orthogonalized momentum, with Keras's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def orthogonalized(matrix: jax.Array, steps: int, coefficients: tuple[float, float, float]) -> jax.Array:
    """Returns an approximation of the orthogonal matrix nearest to a multiple of a matrix.

    Args:
      matrix: an array of two axes.
      steps: number of Newton-Schulz iterations.
      coefficients: coefficients of the quintic polynomial of an iteration.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


def orthogonal_momentum(
    momentum: float, nesterov: bool, steps: int, coefficients: tuple[float, float, float], rms_rate: float | None
) -> optax.GradientTransformation:
    """Accumulates gradients of matrices and orthogonalizes the sum; see `Muon` for the arguments."""

    def step(grad: jax.Array, trace: jax.Array) -> jax.Array:
        moved = orthogonalized(grad + momentum * trace if nesterov else trace, steps, coefficients)
        if rms_rate is not None:
            moved = moved * (max(moved.shape) ** 0.5 * rms_rate)
        return moved.astype(grad.dtype)

    def update(grads: Tree, trace: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        trace = jax.tree.map(lambda grad, before: (grad + momentum * before).astype(before.dtype), grads, trace)
        return jax.tree.map(step, grads, trace), trace

    return optax.GradientTransformation(optax.tree.zeros_like, update)
