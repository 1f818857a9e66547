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
      sizes: the side of images, or their height and width; weights are made at the first of them.
      takes_pixels: whether the model expects values from 0 to 255, and not from -1 to 1.
    """

    name: str
    options: dict = dataclasses.field(default_factory=dict)
    sizes: tuple[keras_twins.Size, ...] = (64, 97)
    takes_pixels: bool = False

    def images(self, size):
        images = keras_twins.images(size)
        return (images + 1) * 127.5 if self.takes_pixels else images

    def ours(self, **options):
        return getattr(models, self.name)(**{"num_classes": 10, **self.options, **options})


TWINS = [
    Twin("EfficientNetB0", sizes=(75, (64, 75)), takes_pixels=True),
    Twin("MobileNet", {"alpha": 0.25}, sizes=(64, (64, 75))),
    Twin("MobileNetV2", {"alpha": 0.35}),
    Twin("MobileNetV2", {"alpha": 1.4}, sizes=(32,)),
    Twin("MobileNetV3Large", {"alpha": 0.75}, sizes=(64, (64, 75)), takes_pixels=True),
    Twin("MobileNetV3Small", sizes=(64, (64, 75)), takes_pixels=True),
    Twin("MobileNetV3Small", {"alpha": 1.25, "include_preprocessing": False}, sizes=(32,)),
    Twin("MobileNetV3Small", {"minimalistic": True}, sizes=((33, 32),), takes_pixels=True),
    Twin("ResNet50", sizes=(64, 75)),
    Twin("ResNet50V2", sizes=(64, 75)),
    Twin("DenseNet121", sizes=(64, 75)),
    Twin("VGG16", sizes=(64, 75)),
    Twin("ConvNeXtTiny", takes_pixels=True),
    Twin("InceptionV3", sizes=(75, 98)),
    Twin("Xception", sizes=(71, 96)),
    *(Twin(name, sizes=(64,)) for name in (
        "ResNet101", "ResNet152", "ResNet101V2", "ResNet152V2", "DenseNet169", "DenseNet201", "VGG19")),
    Twin("ConvNeXtSmall", sizes=(32,), takes_pixels=True),
]


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


def keras_model(keras, twin, size, **options):
    keras.utils.set_random_seed(0)
    return getattr(keras.applications, twin.name)(
        weights=None, classes=10, input_shape=(*keras_twins.sides(size), 3), **twin.options, **options)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.name}-{twin.options}")
def test_predictions_are_those_of_keras(keras, twin, tmp_path):
    theirs = keras_model(keras, twin, twin.sizes[0])
    first = twin.images(twin.sizes[0])
    keras_twins.scaled_head(keras, keras_twins.settled(keras, theirs, first), first)
    path = tmp_path / "theirs.weights.h5"
    ours = keras_twins.twin(theirs, twin.ours(), twin.sizes[0], path)
    outputs = np.log(ours.predict(first, verbose=0))
    assert outputs.std(0).mean() > 0.2, "the weights must tell images apart"
    for size in twin.sizes:
        if size != twin.sizes[0]:
            theirs = keras_model(keras, twin, size)
            theirs.load_weights(path)  # not `set_weights`, after which `Normalization` computes with what it had
        assert keras_twins.difference(theirs, ours, twin.images(size)) < 1e-4
