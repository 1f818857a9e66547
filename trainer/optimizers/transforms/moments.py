"""Steps along running means of gradients and of their squares: Adam and its variants, with Keras's numbers.

They differ from optax's transformations in the position of epsilon.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


class MomentsState(NamedTuple):
    """Running moments of the gradients.

    Attributes:
      count: number of updates, an int32 scalar.
      mu: running mean, a tree like the parameters.
      nu: running mean of squares, or running maximum of absolute values; a tree like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    mu: Tree
    nu: Tree


class AmsgradState(NamedTuple):
    """The running moments, and the maximum second moment over all updates, a tree like the parameters."""

    moments: MomentsState
    nu_max: Tree


class NadamState(NamedTuple):
    """The running moments, and the product of all momentum coefficients, a float32 scalar."""

    moments: MomentsState
    product: jax.Array


def init_moments(params: Tree) -> MomentsState:
    """Returns zero moments, with the shapes and dtypes of `params`."""
    return MomentsState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))


def update_moments(grads: Tree, state: MomentsState, beta_1: float, beta_2: float) -> MomentsState:
    """Returns the moments after an update with `grads`."""
    return MomentsState(
        optax.safe_increment(state.count),
        optax.tree.update_moment(grads, state.mu, beta_1, 1),
        optax.tree.update_moment(grads, state.nu, beta_2, 2),
    )


def one_minus_power(beta: float, count: jax.Array) -> jax.Array:
    """Returns `1 - beta ** count`, the bias correction of a running mean that started at 0; a float32 scalar."""
    return 1 - jnp.float32(beta) ** count.astype(jnp.float32)


def scale_by_adam(beta_1: float, beta_2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam with the paper's "epsilon hat": epsilon is added before the bias correction.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, the end of section 2.
    """

    def update(grads: Tree, state: MomentsState, params: Tree = None) -> tuple[Tree, MomentsState]:
        state = update_moments(grads, state, beta_1, beta_2)
        return _adam_step(state, state.nu, beta_1, beta_2, epsilon), state

    return optax.GradientTransformation(init_moments, update)


def scale_by_amsgrad(beta_1: float, beta_2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam with a second moment that never decreases.

    Source: Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018.
    """

    def init(params: Tree) -> AmsgradState:
        return AmsgradState(init_moments(params), optax.tree.zeros_like(params))

    def update(grads: Tree, state: AmsgradState, params: Tree = None) -> tuple[Tree, AmsgradState]:
        moments = update_moments(grads, state.moments, beta_1, beta_2)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, moments.nu)
        return _adam_step(moments, nu_max, beta_1, beta_2, epsilon), AmsgradState(moments, nu_max)

    return optax.GradientTransformation(init, update)


def _adam_step(moments: MomentsState, nu: Tree, beta_1: float, beta_2: float, epsilon: float) -> Tree:
    correction = jnp.sqrt(one_minus_power(beta_2, moments.count)) / one_minus_power(beta_1, moments.count)
    return jax.tree.map(
        lambda mean, square: (correction * mean / (jnp.sqrt(square) + epsilon)).astype(mean.dtype), moments.mu, nu)


def scale_by_adamax(beta_1: float, beta_2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam with a running maximum in place of the second moment.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, section 7.1.
    """

    def update(grads: Tree, state: MomentsState, params: Tree = None) -> tuple[Tree, MomentsState]:
        state = MomentsState(
            optax.safe_increment(state.count),
            optax.tree.update_moment(grads, state.mu, beta_1, 1),
            jax.tree.map(lambda largest, grad: jnp.maximum(beta_2 * largest, jnp.abs(grad)), state.nu, grads),
        )
        correction = one_minus_power(beta_1, state.count)
        return jax.tree.map(
            lambda mean, largest: (mean / (correction * (largest + epsilon))).astype(mean.dtype), state.mu, state.nu,
        ), state

    return optax.GradientTransformation(init_moments, update)


def scale_by_nadam(beta_1: float, beta_2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam with Nesterov momentum, whose coefficient grows from about half of `beta_1` to `beta_1`.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016, with the schedule of its section 3.
    """

    # Rounded to float32 first, as in Keras, so that 1 - beta is the same number in the moments and their corrections.
    beta_1, beta_2 = float(np.float32(beta_1)), float(np.float32(beta_2))

    def init(params: Tree) -> NadamState:
        return NadamState(init_moments(params), jnp.ones((), jnp.float32))

    def update(grads: Tree, state: NadamState, params: Tree = None) -> tuple[Tree, NadamState]:
        moments = update_moments(grads, state.moments, beta_1, beta_2)
        count = moments.count.astype(jnp.float32)
        now, following = (beta_1 * (1 - 0.5 * jnp.float32(0.96) ** step) for step in (count, count + 1))
        product = state.product * now
        mean_scale = following / (1 - product * following)
        grad_scale = (1 - now) / (1 - product)
        correction = one_minus_power(beta_2, moments.count)

        def step(mean: jax.Array, square: jax.Array, grad: jax.Array) -> jax.Array:
            ahead = mean_scale * mean + grad_scale * grad
            return (ahead / (jnp.sqrt(square / correction) + epsilon)).astype(mean.dtype)

        return jax.tree.map(step, moments.mu, moments.nu, grads), NadamState(moments, product)

    return optax.GradientTransformation(init, update)
