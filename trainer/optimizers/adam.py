"""Adam and its variants, with Keras's arguments and numbers."""

from __future__ import annotations

from typing import Unpack

import optax

from trainer.core import arguments
from trainer.optimizers import transforms
from trainer.optimizers.base import Optimizer
from trainer.optimizers.common_arguments import (
    CommonArguments,
    FurtherArguments,
    takes_common_arguments,
    with_common_arguments,
)
from trainer.optimizers.learning_rate import Schedule


class Adam(Optimizer):
    """Steps along a running mean of the gradients, divided by the root of a running mean of their squares.

    Args:
      learning_rate: a non-negative number, or a schedule.
      beta_1: decay rate of the running mean, in [0, 1).
      beta_2: decay rate of the running mean of squares, in [0, 1).
      epsilon: term added to the root in the divisor; above 0.
      amsgrad: whether to replace the mean of squares by its maximum over all updates.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014; Reddi, Kale and Kumar, "On the
    Convergence of Adam and Beyond", 2018.

    Example:
      >>> float(Adam(0.5).learning_rate)
      0.5
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(beta_1=beta_1, beta_2=beta_2)
        arguments.require_positive(epsilon=epsilon)
        arguments.require_bool(amsgrad=amsgrad)
        scale = transforms.scale_by_amsgrad if amsgrad else transforms.scale_by_adam
        transformation = with_common_arguments(scale(beta_1, beta_2, epsilon), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class AdamW(Adam):
    """`Adam` with weight decay by default.

    Takes the arguments of `Adam`; `weight_decay` comes second and cannot be None.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **common: Unpack[FurtherArguments],
    ):
        arguments.require_non_negative(weight_decay=weight_decay)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **common)


class Adamax(Optimizer):
    """`Adam` with a running maximum of the gradients' absolute values as divisor.

    Takes the arguments of `Adam`, without `amsgrad`. `beta_2` is the decay rate of the maximum.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, section 7.1.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(beta_1=beta_1, beta_2=beta_2)
        arguments.require_positive(epsilon=epsilon)
        transformation = with_common_arguments(
            transforms.scale_by_adamax(beta_1, beta_2, epsilon), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class Nadam(Optimizer):
    """`Adam` with Nesterov momentum.

    Takes the arguments of `Adam`, without `amsgrad`.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(beta_1=beta_1, beta_2=beta_2)
        arguments.require_positive(epsilon=epsilon)
        transformation = with_common_arguments(
            transforms.scale_by_nadam(beta_1, beta_2, epsilon), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class Lamb(Optimizer):
    """`Adam` with each parameter's update scaled to the parameter's norm, for large batches.

    Takes the arguments of `Adam`, without `amsgrad`. Parameters and updates of norm 0 are not scaled.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(beta_1=beta_1, beta_2=beta_2)
        arguments.require_positive(epsilon=epsilon)
        transformation = with_common_arguments(
            optax.scale_by_adam(beta_1, beta_2, epsilon), optax.scale_by_trust_ratio(), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))
