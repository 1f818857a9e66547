"""Gradients that are averaged over several calls, of which the last makes an update."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class AveragedGradientsState(NamedTuple):
    """What is left over between two updates.

    Attributes:
      calls: since the last update, an int32 scalar.
      sums: of the gradients of these calls, a tree like the parameters.
      inner: the state of the transformation that makes the updates.
    """

    calls: jax.Array
    sums: Tree
    inner: Any


class AveragedGradients(optax.GradientTransformationExtraArgs):
    """What `average_gradients` returns: a transformation, and how many calls make an update."""

    steps: int


def average_gradients(transformation: optax.GradientTransformation, steps: int) -> AveragedGradients:
    """Makes the updates of `transformation` with the mean of the gradients of `steps` calls; nothing in between.

    Args:
      transformation: what turns gradients into updates.
      steps: how many calls make an update.

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
