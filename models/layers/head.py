"""The classifier head: from logits to the inputs of the loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

# Activation of a classifier: a function over the last axis, Keras's name, or None for logits. Functions come before
# text, so that a configuration's path of a function is imported.
ClassifierActivation = Callable[[jax.Array], jax.Array] | str | None
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": nn.softmax, "sigmoid": nn.sigmoid, "linear": lambda logits: logits}


def classify(logits: jax.Array, classifier_activation: ClassifierActivation) -> jax.Array:
    """Applies the activation of a classifier, in at least float32.

    Logits of a narrower dtype are widened first. In low precision, probabilities do not sum to 1 and small
    probabilities are lost to rounding. Without an activation the logits are widened too, because a loss exponentiates
    them.

    Args:
      logits: floating-point logits of shape `(..., num_classes)`.
      classifier_activation: activation over the last axis: "softmax", "sigmoid", or a function such as `nn.softmax`.
        "linear" and None return logits.

    Returns:
      An array of the same shape: float32, or float64 for float64 logits.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if isinstance(classifier_activation, str):
        classifier_activation = ACTIVATIONS[classifier_activation]
    return logits if classifier_activation is None else classifier_activation(logits)
