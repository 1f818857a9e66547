"""Flax modules to train: published architectures, each in its own file, with the names of `keras.applications`.

They are plain Linen modules and know nothing of the trainer; any of them works with any Flax training loop.
"""

from trainer.models.mlp import MLP
from trainer.models.vision.cnn import CNN
from trainer.models.vision.efficientnet import (
    EfficientNetB0,
    EfficientNetB1,
    EfficientNetB2,
    EfficientNetB3,
    EfficientNetB4,
    EfficientNetB5,
    EfficientNetB6,
    EfficientNetB7,
)
from trainer.models.vision.mobilenet import MobileNet
from trainer.models.vision.mobilenet_v2 import MobileNetV2
from trainer.models.vision.mobilenet_v3 import MobileNetV3Large, MobileNetV3Small
from trainer.models.weights.keras_weights import load_keras_weights

__all__ = [
    "CNN", "MLP", "EfficientNetB0", "EfficientNetB1", "EfficientNetB2", "EfficientNetB3", "EfficientNetB4",
    "EfficientNetB5", "EfficientNetB6", "EfficientNetB7", "MobileNet", "MobileNetV2", "MobileNetV3Large",
    "MobileNetV3Small", "load_keras_weights",
]
