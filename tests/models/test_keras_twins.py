"""Our models against those of `keras.applications` with the same weights: predictions, and statistics in training."""

import dataclasses

import numpy as np
import pytest

from tests.support import keras_twins
from trainer import models

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras


@dataclasses.dataclass(frozen=True)
class Twin:
    """A model of ours, the name of its twin in `keras.applications`, and the sizes of images to compare at.

    Attributes:
      name: in both.
      options: arguments of both; `num_classes` is `classes` there.
      sizes: the side of images, the first of which weights are made at.
      scale: what images with values from -1 to 1 are multiplied by, after adding 1 where the model expects 0 to 255.
    """

    name: str
    options: dict = dataclasses.field(default_factory=dict)
    sizes: tuple[int, ...] = (64, 97)
    takes_pixels: bool = False

    def images(self, size):
        images = keras_twins.images(size)
        return (images + 1) * 127.5 if self.takes_pixels else images

    def ours(self, **options):
        return getattr(models, self.name)(**{"num_classes": 10, **self.options, **options})


TWINS = [
    Twin("MobileNetV2", {"alpha": 0.35}),
    Twin("MobileNetV2", {"alpha": 1.4}, sizes=(32,)),
    Twin("ConvNeXtTiny", takes_pixels=True),
    Twin("ConvNeXtSmall", sizes=(32,), takes_pixels=True),
    Twin("InceptionV3", sizes=(75, 98)),
    Twin("Xception", sizes=(71, 96)),
