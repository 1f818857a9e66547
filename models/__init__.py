"""Flax modules to train: published architectures, each in its own file, with the names of `keras.applications`.

They are plain Linen modules and know nothing of the trainer; any of them works with any Flax training loop.
"""

from trainer.models.mlp import MLP
from trainer.models.vision.cnn import CNN
from trainer.models.vision.convnext import ConvNeXtBase, ConvNeXtLarge, ConvNeXtSmall, ConvNeXtTiny
from trainer.models.vision.inception_v3 import InceptionV3
from trainer.models.vision.mobilenet_v2 import MobileNetV2
from trainer.models.vision.unet import UNet
from trainer.models.vision.vit import ViTB16, ViTB32, ViTL16, ViTS16
from trainer.models.vision.xception import Xception
from trainer.models.weights.keras_weights import load_keras_weights

__all__ = ["CNN", "MLP", "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny", "InceptionV3", "MobileNetV2",
           "UNet", "ViTB16", "ViTB32", "ViTL16", "ViTS16", "Xception", "load_keras_weights"]
