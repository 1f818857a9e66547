"""Optimizers for large models: Adafactor, Muon and schedule-free AdamW, with Keras's arguments and numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import optax

from trainer.core import arguments
from trainer.core.tree_paths import path_name
from trainer.optimizers import transforms
from trainer.optimizers.base import Optimizer
from trainer.optimizers.common_arguments import (
    CommonArguments,
    FurtherArguments,
    takes_common_arguments,
    with_common_arguments,
)
from trainer.optimizers.learning_rate import Schedule


class Adafactor(Optimizer):
    """Divides the gradient by a factored estimate of its size, and scales the step to the size of the weights.

    The estimate is the product of running means over rows and over columns.

    Args:
      learning_rate: a non-negative number, or a schedule. The rate of update t is at most `1 / sqrt(t)`.
      beta_2_decay: exponent of the decay rate: `1 - t**beta_2_decay` at update t; below 0.
      epsilon_1: term added to squared gradients; above 0.
      epsilon_2: lower bound of the size of an array, to which its steps are relative; above 0.
      clip_threshold: maximum root mean square of an array's step, before scaling; above 0.
      relative_step: accepted for compatibility with Keras, without effect: the limit of the rate always applies.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
    https://arxiv.org/abs/1804.04235.

    Example:
      >>> import jax.numpy as jnp
      >>> state = Adafactor().init({"kernel": jnp.zeros((128, 64))})
      >>> sum(leaf.size for leaf in jax.tree.leaves(state.inner))  # of 8192 weights
      194
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_2_decay: float = -0.8,
        epsilon_1: float = 1e-30,
        epsilon_2: float = 1e-3,
        clip_threshold: float = 1.0,
        relative_step: bool = True,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_positive(epsilon_1=epsilon_1, epsilon_2=epsilon_2, clip_threshold=clip_threshold)
        arguments.require_bool(relative_step=relative_step)
        if not beta_2_decay < 0:
            raise ValueError(f"`beta_2_decay` must be below 0. Received: {beta_2_decay!r}.")
        transformation = with_common_arguments(
            transforms.descend_factored(beta_2_decay, epsilon_1, epsilon_2, clip_threshold), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class Muon(Optimizer):
    """Steps along the orthogonalized momentum of matrices; uses AdamW for other arrays and for embeddings.

    Args:
      learning_rate: a non-negative number, or a schedule.
      adam_beta_1: `beta_1` of AdamW.
      adam_beta_2: `beta_2` of AdamW.
      adam_weight_decay: `weight_decay` of AdamW; None for no weight decay.
      epsilon: `epsilon` of AdamW.
      weight_decay: share of each matrix, times the learning rate, that is subtracted before an update; None for no
        weight decay.
      exclude_layers: regular expressions; arrays whose path contains a match use AdamW.
      exclude_embeddings: whether arrays with "embedding" in their path use AdamW.
      muon_a: first coefficient of the orthogonalizing polynomial.
      muon_b: second coefficient of the orthogonalizing polynomial.
      muon_c: third coefficient of the orthogonalizing polynomial.
      adam_lr_ratio: factor of the learning rate for AdamW.
      momentum: decay rate of the momentum, in [0, 1).
      ns_steps: number of iterations of the polynomial.
      nesterov: whether to use Nesterov momentum.
      rms_rate: factor of the steps of matrices, together with the root of their larger dimension, so that learning
        rates of Adam are suitable; None for no scaling.
      **common: clipping, gradient accumulation and a name, after `weight_decay`; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; for `rms_rate`, Liu et al.,
    "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982.

    Example:
      >>> import jax.numpy as jnp
      >>> state = Muon().init({"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros(4)})
      >>> sum(leaf.size for leaf in jax.tree.leaves(state.inner)) - 1  # one moment of the kernel, two of the bias
      40
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        adam_beta_1: float = 0.9,
        adam_beta_2: float = 0.999,
        adam_weight_decay: float | None = 0.004,
        epsilon: float = 1e-7,
        weight_decay: float | None = 0.004,
        *,
        exclude_layers: Sequence[str] | None = None,
        exclude_embeddings: bool = True,
        muon_a: float = 3.4445,
        muon_b: float = -4.7750,
        muon_c: float = 2.0315,
        adam_lr_ratio: float = 1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        nesterov: bool = True,
        rms_rate: float | None = 0.2,
        **common: Unpack[FurtherArguments],
    ):
        arguments.require_decay_rate(adam_beta_1=adam_beta_1, adam_beta_2=adam_beta_2, momentum=momentum)
        arguments.require_positive(epsilon=epsilon, adam_lr_ratio=adam_lr_ratio)
        arguments.require_bool(exclude_embeddings=exclude_embeddings, nesterov=nesterov)
        arguments.check_count("ns_steps", ns_steps, 1)
        names = arguments.as_names("exclude_layers", exclude_layers) if exclude_layers else ()
        patterns = [re.compile(pattern) for pattern in names]

        def has_adam(path: Any, param: Any) -> bool:
            text = path_name(path)
            return (param.ndim != 2 or (exclude_embeddings and "embedding" in text.lower())
                    or any(pattern.search(text) for pattern in patterns))

        adam = optax.chain(transforms.scale_by_adam(adam_beta_1, adam_beta_2, epsilon), transforms.descend(),
                           optax.scale(adam_lr_ratio))
        muon = optax.chain(
            transforms.orthogonal_momentum(momentum, nesterov, ns_steps, (muon_a, muon_b, muon_c), rms_rate),
            transforms.descend())
        parts = optax.partition(
            {True: _decayed(adam, adam_weight_decay), False: _decayed(muon, weight_decay)},
            lambda params: jax.tree_util.tree_map_with_path(has_adam, params))
        transformation = with_common_arguments(parts, **common)
        super().__init__(transformation, learning_rate, common.get("name"))


class ScheduleFreeAdamW(Optimizer):
    """Adam with averaging of the weights in place of a learning-rate schedule.

    Args:
      learning_rate: a non-negative number, or a schedule.
      beta_1: weight of the mean in the interpolation at which gradients are taken; above 0 and below 1.
      beta_2: decay rate of the running mean of squares, in [0, 1).
      epsilon: term added to the root in the divisor; above 0.
      warmup_steps: number of updates over which the rate rises from 0.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range, or if more than one clip is given.

    Source: Defazio et al., "The Road Less Scheduled", 2024, https://arxiv.org/abs/2405.15682.

    Example:
      >>> float(ScheduleFreeAdamW(0.5).learning_rate)
      0.5
    """

    @takes_common_arguments
    def __init__(
        self,
        learning_rate: float | Schedule = 0.0025,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        warmup_steps: int = 0,
        **common: Unpack[CommonArguments],
    ):
        arguments.require_decay_rate(beta_1=beta_1, beta_2=beta_2)
        arguments.require_positive(beta_1=beta_1, epsilon=epsilon)
        arguments.check_count("warmup_steps", warmup_steps, 0)
        transformation = with_common_arguments(
            transforms.descend_schedule_free(beta_1, beta_2, epsilon, warmup_steps), **common)
        super().__init__(transformation, learning_rate, common.get("name"))


def _decayed(step: optax.GradientTransformation, weight_decay: float | None) -> optax.GradientTransformation:
    if weight_decay is None:
        return step
    arguments.require_non_negative(weight_decay=weight_decay)
    return transforms.after_weight_decay(step, weight_decay)
