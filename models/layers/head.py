"""The last step of every classifier: from logits to what the loss expects."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def classify(logits: jax.Array, classifier_activation: Callable[[jax.Array], jax.Array] | None) -> jax.Array:
    """Applies a classifier's final activation, in float32 at least.

    Low-precision probabilities do not sum to one and lose the small ones to rounding, so logits of a narrower dtype
    are widened first, also where no activation is asked for: a loss on logits exponentiates them.

    Args:
      logits: any floating dtype, shape `(..., num_classes)`.
      classifier_activation: what to apply over the last axis, such as `nn.softmax`; None for the logits themselves.

    Returns:
      An array of the same shape, of dtype float32, or float64 for float64 logits.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return logits if classifier_activation is None else classifier_activation(logits)
