"""The base class of image classifiers: input checks, features and head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers
from trainer.models.layers.head import ClassifierActivation, classify

_POOLINGS = (None, "avg", "max")


class ImageModel(ConvLayers):
    """Base class of image classifiers, with or without the head.

    A family defines `features` and, with `smallest_side`, the smallest supported images.

    Attributes:
      num_classes: number of classes.
      include_top: whether to include the classifier: pooling, dropout and a dense layer called "predictions". Otherwise
        the model returns the feature map, of shape `(rows, height, width, channels)`.
      pooling: pooling of the feature map without the classifier: "avg" or "max" returns one vector per image.
      classifier_activation: activation of the classifier: "softmax", "sigmoid" or a function; None and "linear" return
        logits.
      dropout_rate: dropout rate of the classifier's inputs.

    Raises:
      ValueError: if the input does not have shape `(rows, height, width, channels)` or is too small, or `pooling` is
        unknown. The constructor raises it for an invalid `num_classes`, rate or flag.
    """

    num_classes: int = 1000
    include_top: bool = True
    pooling: str | None = None
    classifier_activation: ClassifierActivation = nn.softmax
    dropout_rate: float = 0.0
    smallest_side: int = 32

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the feature map of images; subclasses must define it."""
        raise NotImplementedError(f"{type(self).__name__} must define `features(self, x, training)`.")

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns class probabilities of shape `(rows, num_classes)`, logits, or features."""
        name = type(self).__name__
        if x.ndim != 4:
            raise ValueError(f"{name} expects images of shape (rows, height, width, channels). Received: shape "
                             f"{x.shape}. Grey images need a channel axis: `images[..., None]`.")
        if self.pooling not in _POOLINGS:
            raise ValueError(f"`pooling` must be None, \"avg\" or \"max\". Received: {self.pooling!r}.")
        if min(x.shape[1:3]) < self.smallest_side:
            is_channels_first = x.shape[1] in (1, 3) and min(x.shape[2:]) >= self.smallest_side
            fix = "Channels stand last: `np.moveaxis(x, 1, -1)`." if is_channels_first else "Resize them."
            raise ValueError(f"{name} expects images of at least {self.smallest_side}x{self.smallest_side} pixels, of "
                             f"shape (rows, height, width, channels). Received: shape {x.shape}. {fix}")
        x = self.features(x, training)
        return self.head(x, training) if self.include_top else self.headless(x)

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map."""
        return self.classified(pooled(x, "avg"), training)

    def headless(self, x: jax.Array) -> jax.Array:
        """Returns the outputs of a model without a classifier, from a feature map."""
        return pooled(x, self.pooling)

    def classified(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs from one vector per image."""
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        return classify(self.dense(x, self.num_classes, name="predictions"), self.classifier_activation)


def pooled(x: jax.Array, pooling: str | None) -> jax.Array:
    """Returns the mean ("avg") or maximum ("max") over height and width, or the whole feature map (None)."""
    if pooling is None:
        return x
    return x.mean((1, 2)) if pooling == "avg" else jnp.max(x, (1, 2))
