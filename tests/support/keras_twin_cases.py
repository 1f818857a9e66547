"""Which models of ours have twins in `keras.applications`, and at which sizes of images they are compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.support import keras_twins
from trainer import models


@dataclasses.dataclass(frozen=True)
class Twin:
    """A model of ours, the name of its twin in `keras.applications`, and the sizes of images to compare at.

    Attributes:
      name: in both.
      options: arguments of both.
      sizes: the side of images, or their height and width; weights are made at the first of them.
      takes_pixels: whether the model expects values from 0 to 255, and not from -1 to 1.
    """

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: tuple[keras_twins.Size, ...] = (64, 97)
    takes_pixels: bool = False

    def images(self, size: keras_twins.Size, rows: int = keras_twins.ROWS, seed: int = 0) -> np.ndarray:
        """Returns images with the values that the model expects."""
        images = keras_twins.images(size, rows, seed)
        return (images + 1) * 127.5 if self.takes_pixels else images

    def ours(self):
        """Returns our module, for 10 classes."""
        return getattr(models, self.name)(num_classes=10, **self.options)

    def theirs(self, keras, size: keras_twins.Size):
        """Returns Keras's model for 10 classes."""
        keras.utils.set_random_seed(0)
        return getattr(keras.applications, self.name)(
            weights=None, classes=10, input_shape=(*keras_twins.sides(size), 3), **self.options)


# A model of each family.
FAMILIES = [
    Twin("MobileNet", {"alpha": 0.25}, sizes=(64, (64, 75))),
    Twin("MobileNetV2", {"alpha": 0.35}),
    Twin("MobileNetV3Small", {"minimalistic": True}, sizes=((33, 32),), takes_pixels=True),
    Twin("MobileNetV3Large", {"alpha": 0.75}, sizes=(64, (64, 75)), takes_pixels=True),
    # With statistics of 64 x 64 pixels, float32 itself is 1e-4 from float64 in images of other sizes.
    Twin("EfficientNetB0", sizes=(75, (64, 75)), takes_pixels=True),
    Twin("ResNet50", sizes=(64, 75)),
    Twin("ResNet50V2", sizes=(64, 75)),
    Twin("DenseNet121", sizes=(64, 75)),
    Twin("VGG16", sizes=(64, 75)),
    Twin("InceptionV3", sizes=(75, 98)),
    Twin("Xception", sizes=(71, 96)),
    Twin("ConvNeXtTiny", takes_pixels=True),
]
# Larger and wider models, which have the same layers.
OTHERS = [
    Twin("MobileNetV2", {"alpha": 1.4}, sizes=(32, 64)),
    Twin("MobileNetV3Small", sizes=(64, (64, 75)), takes_pixels=True),
    Twin("MobileNetV3Small", {"alpha": 1.25, "include_preprocessing": False}, sizes=(32, 64)),
    Twin("EfficientNetB1", sizes=(75, (64, 75)), takes_pixels=True),
    *(Twin(name, sizes=(64, 75)) for name in (
        "ResNet101", "ResNet152", "ResNet101V2", "ResNet152V2", "DenseNet169", "DenseNet201", "VGG19")),
    Twin("ConvNeXtSmall", takes_pixels=True),
]
