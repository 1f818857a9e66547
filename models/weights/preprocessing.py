"""Preprocessing of images with values from 0 to 255 for published weights."""

from __future__ import annotations

import difflib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from trainer.core.calls.entry_points import explains_arguments
from trainer.core.calls.tracebacks import user_stacklevel

_BGR_MEANS = (103.939, 116.779, 123.68)
_RGB_MEANS, _RGB_DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_MODES = {
    **dict.fromkeys(("MobileNet", "MobileNetV2", "ResNet50V2", "ResNet101V2", "ResNet152V2", "InceptionV3", "Xception",
                     "ViTS16", "ViTB16", "ViTB32", "ViTL16"), "tf"),
    **dict.fromkeys(("ResNet50", "ResNet101", "ResNet152", "VGG16", "VGG19"), "caffe"),
    **dict.fromkeys(("ResNet18", "ResNet34", "DenseNet121", "DenseNet169", "DenseNet201"), "torch"),
    # Models with built-in preprocessing.
    **dict.fromkeys(("MobileNetV3Small", "MobileNetV3Large", *(f"EfficientNetB{size}" for size in range(8)),
                     "ConvNeXtTiny", "ConvNeXtSmall", "ConvNeXtBase", "ConvNeXtLarge"), "none"),
}


@explains_arguments
def preprocess_input(x: np.ndarray | jax.Array, model: str | type | nn.Module) -> jax.Array:
    """Returns images preprocessed for a model's published weights, as in `keras.applications`.

    Args:
      x: images with values from 0 to 255, of shape `(..., height, width, 3)` and any dtype. Floats in the memory of the
        host that are all from 0 to 1 give a RuntimeWarning.
      model: name of the model, such as "ResNet50", its class, or the module. Modules with `style="torchvision"` use the
        preprocessing of torchvision.

    Returns:
      float32 images. "tf" (MobileNet, MobileNetV2, ResNetV2, Inception, Xception and ViT): from -1 to 1. "torch"
      (DenseNet, ResNet18 and ResNet34): from 0 to 1, then normalized by ImageNet's mean and standard deviation. "caffe"
      (ResNet50 to ResNet152, VGG): channels in BGR order, minus ImageNet's means. MobileNetV3, EfficientNet and
      ConvNeXt, with built-in preprocessing: unchanged.

    Raises:
      ValueError: if the model is unknown, or `x` does not have three channels.

    >>> preprocess_input(np.full((1, 2, 2, 3), 255), "MobileNetV2")[0, 0, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    mode = _mode_of(model)
    if isinstance(x, np.ndarray) and x.size and np.issubdtype(x.dtype, np.floating) and x.min() >= 0 < x.max() <= 1:
        warnings.warn(f"`preprocess_input` expects values from 0 to 255. Received: values from {x.min():.2g} to "
                      f"{x.max():.2g}. If these are images from 0 to 1, give `255 * x`.", RuntimeWarning,
                      stacklevel=user_stacklevel())
    x = jnp.asarray(x)
    if x.ndim < 3 or x.shape[-1] != 3:
        raise ValueError(f"Images must have three channels, in the last axis. Received: shape {x.shape}.")
    x = x.astype(jnp.float32)
    if mode == "tf":
        return x / 127.5 - 1
    if mode == "caffe":
        return x[..., ::-1] - jnp.asarray(_BGR_MEANS)
    if mode == "torch":
        return (x / 255 - jnp.asarray(_RGB_MEANS)) / jnp.asarray(_RGB_DEVIATIONS)
    return x


def _mode_of(model: str | type | nn.Module) -> str:
    if getattr(model, "style", None) == "torchvision":
        return "torch"
    kind = model if isinstance(model, (str, type)) else type(model)
    names = [kind] if isinstance(kind, str) else [each.__name__ for each in kind.__mro__]
    mode = next((_MODES[name] for name in names if name in _MODES), None)
    if mode is None:
        near = difflib.get_close_matches(names[0].lower(), {name.lower() for name in _MODES}, n=3)
        hint = ", ".join(repr(name) for name in _MODES if name.lower() in near) or "'ResNet50'"
        raise ValueError("`model` must be the name of a model of `trainer.models` with published weights, or that "
                         f"model. Received: {names[0]!r}. Near: {hint}.")
    return mode
