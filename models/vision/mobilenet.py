"""MobileNet: depthwise convolutions followed by pointwise convolutions."""

from __future__ import annotations

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import relu6
from trainer.models.layers.head import classify
from trainer.models.layers.image_model import ImageModel, pooled

# Channels and strides of each block.
_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


class MobileNet(ImageModel):
    """MobileNet, for images with values from -1 to 1.

    Howard et al., "MobileNets: Efficient convolutional neural networks for mobile vision applications",
    https://arxiv.org/abs/1704.04861, as in `keras.applications`: 4,253,864 weights for 1000 classes. The classifier is
    a convolution called "conv_preds".

    Attributes:
      alpha: multiplier for the number of channels of each layer.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = MobileNet(num_classes=10, alpha=0.25)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    alpha: float = 1.0
    dropout_rate: float = 1e-3

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        x = self.conv(x, int(32 * self.alpha), 3, 2, name="conv1")
        x = relu6(self.batch_norm(x, training, name="conv1_bn"))
        for number, (channels, strides) in enumerate(_BLOCKS, 1):
            # Keras also pads the end of odd sides.
            x = self.depthwise_conv(x, 3, strides, name=f"conv_dw_{number}",
                                    padding="SAME" if strides == 1 else [(0, 1), (0, 1)])
            x = relu6(self.batch_norm(x, training, name=f"conv_dw_{number}_bn"))
            x = self.conv(x, int(channels * self.alpha), 1, name=f"conv_pw_{number}")
            x = relu6(self.batch_norm(x, training, name=f"conv_pw_{number}_bn"))
        return x

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map."""
        x = pooled(x, "avg")[:, None, None]
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        x = self.conv(x, self.num_classes, 1, name="conv_preds", use_bias=True)
        return classify(x[:, 0, 0], self.classifier_activation)
