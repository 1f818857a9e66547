"""Optimizers that step along a momentum or its sign, with Keras's arguments and numbers."""

from __future__ import annotations

from typing import Unpack

import optax

from trainer.core import arguments
from trainer.optimizers import transforms
from trainer.optimizers.base import Optimizer
from trainer.optimizers.common_arguments import CommonArguments, takes_common_arguments, with_common_arguments
from trainer.optimizers.learning_rate import Schedule


class SGD(Optimizer):
    """Steps against the gradient, or with `momentum` along a decaying sum of all steps.

    The learning rate scales each step before it enters the sum, so a later rate does not change earlier steps.

    Args:
      learning_rate: a non-negative number, or a schedule.
      momentum: decay rate of the sum, in [0, 1]; 0 disables momentum and its state.
      nesterov: whether to use Nesterov momentum.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

    Example:
      >>> float(SGD(0.5, momentum=0.9).learning_rate)
      0.5
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_share(momentum=momentum)
        arguments.require_bool(nesterov=nesterov)
        accumulate = optax.trace(momentum, nesterov) if momentum else optax.identity()
        transformation = with_common_arguments(transforms.descend(), accumulate, **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class Lion(Optimizer):
    """Steps along the sign of a mix of the gradient and its running mean. Each weight moves by the learning rate.

    Args:
      learning_rate: a non-negative number, or a schedule; about a tenth of a suitable rate for `Adam`.
      beta_1: weight of the running mean in the mix, in (0, 1).
      beta_2: decay rate of the running mean, in [0, 1).
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(beta_1=beta_1, beta_2=beta_2)
        arguments.require_positive(beta_1=beta_1)
        transformation = with_common_arguments(optax.scale_by_lion(beta_1, beta_2), transforms.descend(), **common)
        super().__init__(transformation, learning_rate, common.get("name"))
