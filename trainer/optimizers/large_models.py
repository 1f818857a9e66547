"""Optimizers of large models: Adafactor, Muon and schedule-free AdamW, with Keras's arguments and numbers."""

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
    """Divides the gradient by an estimate of its size from means over rows and over columns, scaled to the weights.

    Args:
      learning_rate: a number of at least 0, or a schedule. The rate of update t is at most `1 / sqrt(t)`.
      beta_2_decay: the mean of squares keeps `1 - t**beta_2_decay` of itself at update t; below 0.
      epsilon_1: what is added to squared gradients; above 0.
      epsilon_2: the least size of an array that its steps are relative to; above 0.
      clip_threshold: the largest root mean square of an array's step, before it is scaled; above 0.
      relative_step: taken as Keras takes it, without effect: the rate has its limit either way.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if one is out of its range, or if more than one of the three clips is given.

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
    """Steps along the orthogonalized momentum of matrices; other arrays, and embeddings, have AdamW.

    Args:
      learning_rate: a number of at least 0, or a schedule.
      adam_beta_1: as `beta_1` of `Adam`, for what has AdamW.
      adam_beta_2: as `beta_2` of `Adam`, likewise.
      adam_weight_decay: as `weight_decay` of `Adam`, likewise; None for none.
      epsilon: as of `Adam`, likewise.
      weight_decay: how much of itself, times the learning rate, each matrix loses before an update; None for none.
      exclude_layers: regular expressions; arrays in whose path one is found have AdamW.
      exclude_embeddings: whether arrays with "embedding" in their path have AdamW.
      muon_a: coefficients of the polynomial that orthogonalizes.
      muon_b: likewise.
      muon_c: likewise.
      adam_lr_ratio: what the learning rate is multiplied by for AdamW.
      momentum: how much of the momentum survives an update, in [0, 1).
      ns_steps: how often the polynomial is applied.
      nesterov: whether a step looks ahead.
      rms_rate: matrices' steps are scaled by this times the root of their larger size, so that rates of Adam suit
        them; None for not at all.
      **common: clipping, gradient accumulation and a name, which follow `weight_decay`; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if one is out of its range, or if more than one of the three clips is given.

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
        patterns = [re.compile(pattern) for pattern in exclude_layers or ()]

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
    """Adam whose weights are pulled to the mean of all its steps, which takes the place of a decreasing rate.

    Args:
      learning_rate: a number of at least 0, or a schedule.
      beta_1: how near to the mean the weights are, where gradients are taken; above 0 and below 1.
      beta_2: how much of the running mean of squares survives an update, in [0, 1).
      epsilon: what is added to the root before dividing by it; above 0.
      warmup_steps: over how many updates the rate rises from 0.
      **common: weight decay, clipping, gradient accumulation and a name; see `CommonArguments`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if one is out of its range, or if more than one of the three clips is given.

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
