"""The frame of every classifier of images: the checks, the features that a family has of its own, and the head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers
from trainer.models.layers.head import ClassifierActivation, classify

_POOLINGS = (None, "avg", "max")


class ImageModel(ConvLayers):
    """A classifier of images, or what is left of it without its head.

    A family defines `features`, and by `smallest_side` which images are too small.

    Attributes:
      num_classes: how many classes there are.
      include_top: whether the classifier follows: pooling, dropout and a dense layer called "predictions". Without it
        the feature map of shape `(rows, height, width, channels)` comes out.
      pooling: without the classifier, "avg" or "max" gives one vector for each image.
      classifier_activation: applied to the classifier's outputs: "softmax", "sigmoid" or a function; None and "linear"
        return logits.
      dropout_rate: the fraction of the classifier's inputs that is dropped in training.

    Raises:
      ValueError: the input is not of shape `(rows, height, width, channels)` or too small, or `pooling` is unknown.
        Before any input: `num_classes`, a rate or a flag cannot work.
    """

    num_classes: int = 1000
    include_top: bool = True
    pooling: str | None = None
    classifier_activation: ClassifierActivation = nn.softmax
    dropout_rate: float = 0.0
    smallest_side: int = 32

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the feature map of images; to be defined by a family."""
        raise NotImplementedError(f"{type(self).__name__} must define `features(self, x, training)`.")

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns class probabilities, of shape `(rows, num_classes)`; or logits, or features, see above."""
        name = type(self).__name__
        if x.ndim != 4:
            raise ValueError(f"{name} expects images of shape (rows, height, width, channels). Received: shape "
                             f"{x.shape}. Grey images need a channel axis: `images[..., None]`.")
        if self.pooling not in _POOLINGS:
            raise ValueError(f"`pooling` must be None, \"avg\" or \"max\". Received: {self.pooling!r}.")
        if min(x.shape[1:3]) < self.smallest_side:
            raise ValueError(f"{name} expects images of at least {self.smallest_side}x{self.smallest_side} pixels. "
                             f"Received: shape {x.shape}. Resize them.")
        x = self.features(x, training)
        return self.head(x, training) if self.include_top else self.headless(x)

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map."""
        return self.classified(pooled(x, "avg"), training)

    def headless(self, x: jax.Array) -> jax.Array:
        """Returns what comes out for a feature map where no classifier follows."""
        return pooled(x, self.pooling)

    def classified(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for one vector of each image."""
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        return classify(self.dense(x, self.num_classes, name="predictions"), self.classifier_activation)


def pooled(x: jax.Array, pooling: str | None) -> jax.Array:
    """Returns the mean ("avg") or the maximum ("max") of a feature map over height and width; or all of it (None)."""
    if pooling is None:
        return x
    return x.mean((1, 2)) if pooling == "avg" else jnp.max(x, (1, 2))
