"""What published weights expect of images: values from 0 to 255 become what a family was trained on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_BGR_MEANS = (103.939, 116.779, 123.68)
_RGB_MEANS, _RGB_DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# By the beginning of a model's name. Families that are not here take values from 0 to 255.
_MODES = {"MobileNetV3": "none", "MobileNet": "tf", "InceptionV3": "tf", "Xception": "tf", "VGG": "caffe",
          "DenseNet": "torch", "EfficientNet": "none", "ConvNeXt": "none", "ViT": "tf"}


def preprocess_input(x: np.ndarray | jax.Array, model: str) -> jax.Array:
    """Returns images as the published weights of a model expect them, as `keras.applications` prepares them.

    Args:
      x: images with values from 0 to 255, of shape `(..., height, width, 3)`, of any dtype.
      model: the name of the model, such as "ResNet50".

    Returns:
      float32. "tf" (MobileNet, MobileNetV2, ResNetV2, Inception, Xception, and ViT): from -1 to 1. "torch" (DenseNet,
      ResNet18 and ResNet34): from 0 to 1, then normalized by ImageNet's mean and deviation. "caffe" (ResNet50 to
      ResNet152, VGG): channels in the order blue, green, red, less ImageNet's means. MobileNetV3, EfficientNet and
      ConvNeXt prepare images themselves: unchanged.

    Raises:
      ValueError: the model is unknown, or `x` does not have three channels.

    >>> preprocess_input(np.full((1, 2, 2, 3), 255), "MobileNetV2")[0, 0, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    mode = _mode_of(model)
    if x.ndim < 3 or x.shape[-1] != 3:
        raise ValueError(f"Images must have three channels, in the last axis. Received: shape {x.shape}.")
    x = jnp.asarray(x, jnp.float32)
    if mode == "tf":
        return x / 127.5 - 1
    if mode == "caffe":
        return x[..., ::-1] - jnp.asarray(_BGR_MEANS)
    if mode == "torch":
        return (x / 255 - jnp.asarray(_RGB_MEANS)) / jnp.asarray(_RGB_DEVIATIONS)
    return x


def _mode_of(model: str) -> str:
    if model.startswith("ResNet"):
        return "tf" if model.endswith("V2") else "torch" if model in ("ResNet18", "ResNet34") else "caffe"
    mode = next((mode for name, mode in _MODES.items() if model.startswith(name)), None)
    if mode is None:
        raise ValueError(f"`model` must be the name of a model of `trainer.models` with published weights, such as "
                         f"\"ResNet50\". Received: {model!r}.")
    return mode
