"""Gradient accumulation: gradients are averaged over several calls, and the last call makes the update."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class AveragedGradientsState(NamedTuple):
    """The state of `average_gradients`.

    Attributes:
      calls: number of calls since the last update, an int32 scalar.
      sums: sums of the gradients of these calls, a tree like the parameters.
      inner: state of the inner transformation.
    """

    calls: jax.Array
    sums: Tree
    inner: Any


class AveragedGradients(optax.GradientTransformationExtraArgs):
    """The result of `average_gradients`: a transformation with its number of calls per update."""

    steps: int


def average_gradients(transformation: optax.GradientTransformation, steps: int) -> AveragedGradients:
    """Averages the gradients of `steps` calls before each update of `transformation`; other updates are zeros.

    Args:
      transformation: the inner transformation.
      steps: number of calls per update.

    Source: `gradient_accumulation_steps` of `keras.optimizers.Optimizer`.
    """
    transformation = optax.with_extra_args_support(transformation)

    def init(params: Tree) -> AveragedGradientsState:
        return AveragedGradientsState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), transformation.init(params))

    def update(
        grads: Tree, state: AveragedGradientsState, params: Tree, **extra: Any
    ) -> tuple[Tree, AveragedGradientsState]:
        is_last = state.calls == steps - 1
        sums = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), state.sums, grads)
        updates, inner = transformation.update(
            jax.tree.map(lambda total: total / steps, sums), state.inner, params, **extra)

        def if_last(new: Tree, old: Tree) -> Any:
            return jax.tree.map(lambda one, other: jnp.where(is_last, one, other), new, old)

        zeros = optax.tree.zeros_like(sums)
        return if_last(updates, optax.tree.zeros_like(updates)), AveragedGradientsState(
            jnp.where(is_last, 0, state.calls + 1), if_last(zeros, sums), if_last(inner, state.inner))

    made = AveragedGradients(init, update)
    made.steps = steps
    return made
