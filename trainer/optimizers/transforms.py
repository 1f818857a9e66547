"""Optax transformations that Keras's optimizers are chains of, where optax has none with Keras's numbers.

They differ from optax's in where epsilon stands, and in when the learning rate acts: Keras multiplies by it before a
momentum is accumulated, so a rate that changes leaves the accumulated part as it was. Hence the rate reaches them as
the extra argument `learning_rate`, a float32 scalar.
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
      count: updates done, an int32 scalar.
      mu: the running mean, a tree like the parameters.
      nu: the running mean of squares, or the running maximum of absolute values; a tree like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    mu: Tree
    nu: Tree


class AmsgradState(NamedTuple):
    """The running moments, and the largest second moment so far, a tree like the parameters."""

    moments: MomentsState
    nu_max: Tree


class NadamState(NamedTuple):
    """The running moments, and the product of all momentum coefficients so far, a float32 scalar."""

    moments: MomentsState
    product: jax.Array


class FtrlState(NamedTuple):
    """What follow-the-regularized-leader has seen: two trees like the parameters.

    Attributes:
      accumulator: the sum of the squares of the gradients.
      linear: the sum of the gradients, less what the weights owe to the rates' decrease.
    """

    accumulator: Tree
    linear: Tree


def init_moments(params: Tree) -> MomentsState:
    """Returns moments of zero, of the shapes and dtypes of `params`."""
    return MomentsState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))


def update_moments(grads: Tree, state: MomentsState, beta_1: float, beta_2: float) -> MomentsState:
    """Returns the running mean and the running mean of squares with `grads` taken in."""
    return MomentsState(
        optax.safe_increment(state.count),
        optax.tree.update_moment(grads, state.mu, beta_1, 1),
        optax.tree.update_moment(grads, state.nu, beta_2, 2),
    )


def one_minus_power(beta: float, count: jax.Array) -> jax.Array:
    """Returns `1 - beta ** count`, by which a running mean that started at 0 falls short; a float32 scalar."""
    return 1 - jnp.float32(beta) ** count.astype(jnp.float32)


def scale_by_adam(beta_1: float, beta_2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam with the epsilon that its paper calls epsilon hat: added before the correction for the start at 0.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, the end of section 2.
    """

    def update(grads: Tree, state: MomentsState, params: Tree = None) -> tuple[Tree, MomentsState]:
        state = update_moments(grads, state, beta_1, beta_2)
        return _adam_step(state, state.nu, beta_1, beta_2, epsilon), state

    return optax.GradientTransformation(init_moments, update)


def scale_by_amsgrad(beta_1: float, beta_2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam whose second moment never falls.

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
    """Adam with a running maximum in the place of the second moment.

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
    """Adam with Nesterov's momentum, whose coefficient grows from about half of `beta_1` to `beta_1`.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016, with the schedule of its section 3.
    """

    # Rounded to float32 first, as Keras does here: 1 - beta is then one number in the moments and their corrections.
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


def follow_regularized_leader(
    initial_accumulator_value: float, learning_rate_power: float, l1: float, l2: float, l2_shrinkage: float,
    beta: float,
) -> optax.GradientTransformationExtraArgs:
    """Moves each weight to the minimum of the linearized past losses, with a pull to 0 and to where it has been.

    The new weight does not depend on the present one but through `linear`. At a rate of 0, and where no gradient has
    been and the accumulator started at 0, nothing changes; Keras divides by 0 there.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, algorithm 1.
    """
    power = -learning_rate_power

    def init(params: Tree) -> FtrlState:
        return FtrlState(optax.tree.full_like(params, initial_accumulator_value), optax.tree.zeros_like(params))

    def update(
        grads: Tree, state: FtrlState, params: Tree, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, FtrlState]:
        moves = learning_rate > 0
        rate = jnp.where(moves, learning_rate, 1)

        def accumulate(grad: jax.Array, before: jax.Array) -> jax.Array:
            return before + jnp.where(moves, jnp.square(grad), 0).astype(before.dtype)

        def add(grad: jax.Array, linear: jax.Array, before: jax.Array, now: jax.Array, param: jax.Array) -> jax.Array:
            pulled = grad + 2 * l2_shrinkage * param - (now**power - before**power) / rate * param
            return linear + jnp.where(moves, pulled, 0).astype(linear.dtype)

        def step(linear: jax.Array, accumulator: jax.Array, param: jax.Array) -> jax.Array:
            quadratic = accumulator**power / rate + 2 * (l2 + beta / (2 * rate))
            target = (jnp.clip(linear, -l1, l1) - linear) / jnp.where(quadratic > 0, quadratic, 1)
            return jnp.where(moves & (quadratic > 0), target - param, 0).astype(param.dtype)

        accumulator = jax.tree.map(accumulate, grads, state.accumulator)
        linear = jax.tree.map(add, grads, state.linear, state.accumulator, accumulator, params)
        return jax.tree.map(step, linear, accumulator, params), FtrlState(accumulator, linear)

    return optax.GradientTransformationExtraArgs(init, update)


def descend() -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the learning rate."""

    def update(
        grads: Tree, state: optax.EmptyState, params: Tree = None, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, optax.EmptyState]:
        return jax.tree.map(lambda grad: (-learning_rate * grad).astype(grad.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip_each_by_norm(clipnorm: float) -> optax.GradientTransformation:
    """Shrinks each array of the gradients, on its own, to an L2 norm of at most `clipnorm`."""

    def clip(grad: jax.Array, param: jax.Array) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(grad)))
        return grad * (clipnorm / jnp.maximum(norm, clipnorm))

    return optax.stateless_with_tree_map(clip)


def cast_to_params() -> optax.GradientTransformation:
    """Casts the gradients to the dtypes of the parameters, so that the state keeps its dtypes from update to update."""
    return optax.stateless(lambda grads, params: optax.tree.cast_like(grads, params))


def after_weight_decay(
    step: optax.GradientTransformation, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    """Shrinks the parameters by `learning_rate * weight_decay` of themselves, then steps from where they are.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017.
    """
    step = optax.with_extra_args_support(step)

    def update(
        grads: Tree, state: Tree, params: Tree, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, Tree]:
        decay = jax.tree.map(lambda param: (-learning_rate * weight_decay * param).astype(param.dtype), params)
        decayed = optax.apply_updates(params, decay)
        updates, state = step.update(grads, state, decayed, learning_rate=learning_rate, **extra)
        return optax.tree.add(updates, decay), state

    return optax.GradientTransformationExtraArgs(step.init, update)
