"""Optimizers that scale each weight's step by its past gradients, with Keras's arguments and numbers."""

from __future__ import annotations

import math
from typing import Unpack

import optax

from trainer.core import arguments
from trainer.optimizers import transforms
from trainer.optimizers.base import Optimizer
from trainer.optimizers.common_arguments import CommonArguments, takes_common_arguments, with_common_arguments
from trainer.optimizers.learning_rate import Schedule


class Adagrad(Optimizer):
    """Divides the gradient by the root of the sum of its past squares.

    Args:
      learning_rate: a non-negative number, or a schedule.
      initial_accumulator_value: initial value of the sum; at least 0.
      epsilon: term added to the sum before taking its root; above 0.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization",
    2011.

    Example:
      >>> float(Adagrad(0.5).learning_rate)
      0.5
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_non_negative(initial_accumulator_value=initial_accumulator_value)
        arguments.require_positive(epsilon=epsilon)
        transformation = with_common_arguments(
            optax.scale_by_rss(initial_accumulator_value, epsilon), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class RMSprop(Optimizer):
    """Divides the gradient by the root of a running mean of its squares.

    Args:
      learning_rate: a non-negative number, or a schedule.
      rho: decay rate of the running mean, in [0, 1).
      momentum: decay rate of the sum of all steps, in [0, 1]; 0 disables momentum and its state.
      epsilon: term added to the mean before taking its root; above 0.
      centered: whether to divide by the standard deviation instead, which needs a running mean of the gradient.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Hinton, "Neural Networks for Machine Learning", 2012, lecture 6.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(rho=rho)
        arguments.require_share(momentum=momentum)
        arguments.require_positive(epsilon=epsilon)
        arguments.require_bool(centered=centered)
        scale = optax.scale_by_stddev if centered else optax.scale_by_rms
        accumulate = optax.trace(momentum) if momentum else optax.identity()
        transformation = with_common_arguments(scale(rho, epsilon), transforms.descend(), accumulate, **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class Adadelta(Optimizer):
    """Scales the gradient by the ratio of a running mean of past updates to a running mean of past gradients.

    Args:
      learning_rate: a non-negative number, or a schedule; 1.0 gives the paper's method.
      rho: decay rate of the running means, in [0, 1).
      epsilon: term added to both means before taking their roots; above 0.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(rho=rho)
        arguments.require_positive(epsilon=epsilon)
        transformation = with_common_arguments(optax.scale_by_adadelta(rho, epsilon), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class Ftrl(Optimizer):
    """Follow the regularized leader: steps of Adagrad, with an L1 penalty that keeps weights at exactly 0.

    Each weight is recomputed from the sums of its gradients. Weights should therefore start at 0, as in linear models;
    other weights jump towards 0 at the first update. The sums are divided by the learning rate; at a rate of 0, nothing
    changes.

    Args:
      learning_rate: a non-negative number, or a schedule.
      learning_rate_power: power that shrinks the steps as squared gradients accumulate; at most 0, and 0 keeps their
        size.
      initial_accumulator_value: initial value of the sum of squares; at least 0.
      l1_regularization_strength: threshold that the sums must exceed for a weight to leave 0; at least 0.
      l2_regularization_strength: strength of the pull of weights to 0; at least 0.
      l2_shrinkage_regularization_strength: factor of the squared weights in the loss; at least 0.
      beta: term added to the root of the sum of squares; at least 0.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer, weights = Ftrl(0.1, l1_regularization_strength=0.5), jnp.zeros(2)
      >>> updates, _ = optimizer.update(jnp.array([1.0, 0.4]), optimizer.init(weights), weights)
      >>> [round(float(weight), 4) for weight in updates]
      [-0.0477, 0.0]
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **common: Unpack[CommonArguments],
    ):
        arguments.require({"learning_rate_power": learning_rate_power}, "a finite number of at most 0",
                          lambda number: -math.inf < number <= 0)
        arguments.require_non_negative(
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength, beta=beta)
        transformation = with_common_arguments(
            transforms.follow_regularized_leader(
                initial_accumulator_value, learning_rate_power, l1_regularization_strength, l2_regularization_strength,
                l2_shrinkage_regularization_strength, beta), **common)
        super().__init__(transformation, learning_rate, common.get("name"))
