"""The last step of every classifier: from logits to what the loss expects."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

# What follows a classifier's logits: Keras's name, a function over the last axis, or None for the logits themselves.
ClassifierActivation = str | Callable[[jax.Array], jax.Array] | None
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": nn.softmax, "sigmoid": nn.sigmoid, "linear": lambda logits: logits}


def classify(logits: jax.Array, classifier_activation: ClassifierActivation) -> jax.Array:
    """Applies a classifier's final activation, in float32 at least.

    Low-precision probabilities do not sum to one and lose the small ones to rounding, so logits of a narrower dtype
    are widened first, also where no activation is asked for: a loss on logits exponentiates them.

    Args:
      logits: any floating dtype, shape `(..., num_classes)`.
      classifier_activation: what to apply over the last axis: "softmax", "sigmoid", or a function such as
        `nn.softmax`; "linear" and None give the logits themselves.

    Returns:
      An array of the same shape, of dtype float32, or float64 for float64 logits.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if isinstance(classifier_activation, str):
        classifier_activation = ACTIVATIONS[classifier_activation]
    return logits if classifier_activation is None else classifier_activation(logits)
