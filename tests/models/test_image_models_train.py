"""A step of each image model on several devices, under several strategies and with `remat`, is that of one device."""

import jax
import numpy as np
import optax
import pytest

import trainer
from tests.support import keras_twins
from trainer import models
from trainer.models.vision.densenet import DenseNet
from trainer.models.vision.resnet import ResNet
from trainer.models.vision.resnet_v2 import ResNetV2
from trainer.models.vision.vgg import VGG

ROWS = 7  # which devices do not divide


def mirrored(count):
    return trainer.distribute.MirroredStrategy([f"cpu:{index}" for index in range(count)])


def sharded(count):
    return trainer.distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(count)])


CASES = [
    (models.MobileNet(num_classes=3, alpha=0.25, dropout_rate=0.0), 32, mirrored, {}),
    (models.MobileNetV2(num_classes=3, alpha=0.35), 32, mirrored, {"remat": True}),
    (models.MobileNetV3Small(num_classes=3, alpha=0.35, dropout_rate=0.0), 32, sharded, {}),
    (models.EfficientNetB0(num_classes=3, width_coefficient=0.25, depth_coefficient=0.5, dropout_rate=0.0,
                           drop_connect_rate=0.0), 32, sharded, {"remat": True}),
    (ResNet(num_classes=3, blocks=(1, 1)), 32, sharded, {"remat": True}),
    (ResNet(num_classes=3, blocks=(1, 1), bottleneck=False, style="torchvision"), 32, mirrored, {}),
    (ResNetV2(num_classes=3, blocks=(1, 1)), 32, mirrored, {"remat": True}),
    (DenseNet(num_classes=3, blocks=(2, 2), growth_rate=8), 32, sharded, {}),
    (VGG(num_classes=3, convolutions=(1, 1, 1, 1, 1)), 32, sharded, {}),
    (models.ConvNeXtTiny(num_classes=3, depths=(1, 1, 1, 1), widths=(8, 8, 16, 16)), 32, sharded, {"remat": True}),
    (models.ViTB16(num_classes=3, patch_size=8, width=16, depth=2, num_heads=4, mlp_width=24), 32, sharded,
     {"remat": True}),
    (models.UNet(num_classes=3, features=(4, 8, 8)), 16, sharded, {}),
]

NOT_EXHAUSTIVE = ("ResNet", "ViTB16", "MobileNet")


def moved(module, side, strategy, options):
    """Returns the weights before and after a step."""
    images, labels = keras_twins.images(side, ROWS), np.arange(ROWS) % 3
    if isinstance(module, models.UNet):
        labels = np.digitize(images[..., 0], (-0.5, 0.5))  # of each pixel
    with strategy.scope():
        model = trainer.Model(module)
        model.compile(optax.sgd(0.01), "sparse_categorical_crossentropy", **options)
    model.build(images)
    before = model.get_weights()
    model.train_on_batch(images, labels)
    return before, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(("module", "side", "strategy", "options"), [
    pytest.param(*case, id=type(case[0]).__name__, marks=() if type(case[0]).__name__ in NOT_EXHAUSTIVE else
                 pytest.mark.exhaustive) for case in CASES])
def test_a_step_has_the_numbers_of_one_device(module, side, strategy, options):
    before, expected = moved(module, side, mirrored(1), {})
    begin, received = moved(module, side, strategy(4), options)
    jax.tree.map(np.testing.assert_array_equal, begin, before)
    way = np.sqrt(sum(np.square(b - a).sum() for a, b in zip(before, expected, strict=True)))
    off = np.sqrt(sum(np.square(b - a).sum() for a, b in zip(received, expected, strict=True)))
    assert way > 1e-3
    assert off < 1e-3 * way
