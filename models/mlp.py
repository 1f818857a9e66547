"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from flax import linen as nn

from trainer.models.layers.head import ClassifierActivation, classify
from trainer.models.layers.zoo_module import ZooModule


class MLP(ZooModule):
    """Multilayer perceptron: dense layers over flattened input.

    Input of shape `(batch, ...)` is flattened to `(batch, features)` and passes through a dense layer, an activation
    and dropout per entry of `hidden`. The output is `num_classes` probabilities, float32 of shape
    `(batch, num_classes)`.

    Attributes:
      num_classes: number of outputs.
      hidden: width of each hidden layer; an empty sequence gives logistic regression.
      activation: activation of each hidden layer.
      dropout_rate: dropout rate of each hidden layer's outputs.
      classifier_activation: activation of the outputs: "softmax", "sigmoid" or a function; None and "linear" return
        logits.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = MLP(num_classes=3, hidden=(16,))
    >>> images = jnp.zeros((2, 8, 8, 1))
    >>> variables = model.init(jax.random.key(0), images)
    >>> model.apply(variables, images).shape
    (2, 3)
    """

    num_classes: int
    hidden: Sequence[int] = (128,)
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dropout_rate: float = 0.0
    classifier_activation: ClassifierActivation = nn.softmax

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns class probabilities or logits; in training, dropout draws from the "dropout" RNG stream."""
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = self.activation(nn.Dense(width)(x))
            x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        return classify(nn.Dense(self.num_classes, name="classifier")(x), self.classifier_activation)
