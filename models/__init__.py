"""Flax modules to train: published architectures, named as in `keras.applications`.

The modules are plain Linen modules. They do not depend on the trainer and work with any Flax training loop.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from trainer.models.generative.dcgan import DCGANDiscriminator, DCGANGenerator
    from trainer.models.generative.vae import VAE
    from trainer.models.mlp import MLP
    from trainer.models.text.generation import generate
    from trainer.models.text.transformer_encoder import TransformerEncoder
    from trainer.models.text.transformer_lm import TransformerLM
    from trainer.models.vision.cnn import CNN
    from trainer.models.vision.convnext import ConvNeXtBase, ConvNeXtLarge, ConvNeXtSmall, ConvNeXtTiny
    from trainer.models.vision.densenet import DenseNet121, DenseNet169, DenseNet201
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
    from trainer.models.vision.inception_v3 import InceptionV3
    from trainer.models.vision.mobilenet import MobileNet
    from trainer.models.vision.mobilenet_v2 import MobileNetV2
    from trainer.models.vision.mobilenet_v3 import MobileNetV3Large, MobileNetV3Small
    from trainer.models.vision.resnet import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152
    from trainer.models.vision.resnet_v2 import ResNet50V2, ResNet101V2, ResNet152V2
    from trainer.models.vision.unet import UNet
    from trainer.models.vision.vgg import VGG16, VGG19
    from trainer.models.vision.vit import ViTB16, ViTB32, ViTL16, ViTS16
    from trainer.models.vision.xception import Xception
    from trainer.models.weights.keras_weights import load_keras_weights
    from trainer.models.weights.preprocessing import preprocess_input
    from trainer.models.weights.torch_weights import load_torch_weights

__all__ = [
    "CNN",
    "MLP",
    "VAE",
    "VGG16",
    "VGG19",
    "ConvNeXtBase",
    "ConvNeXtLarge",
    "ConvNeXtSmall",
    "ConvNeXtTiny",
    "DCGANDiscriminator",
    "DCGANGenerator",
    "DenseNet121",
    "DenseNet169",
    "DenseNet201",
    "EfficientNetB0",
    "EfficientNetB1",
    "EfficientNetB2",
    "EfficientNetB3",
    "EfficientNetB4",
    "EfficientNetB5",
    "EfficientNetB6",
    "EfficientNetB7",
    "InceptionV3",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Large",
    "MobileNetV3Small",
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet50V2",
    "ResNet101",
    "ResNet101V2",
    "ResNet152",
    "ResNet152V2",
    "TransformerEncoder",
    "TransformerLM",
    "UNet",
    "ViTB16",
    "ViTB32",
    "ViTL16",
    "ViTS16",
    "Xception",
    "generate",
    "load_keras_weights",
    "load_torch_weights",
    "preprocess_input",
]

# Lazy imports: importing all models would take longer than importing the rest of the package.
_FILES = {
    "generative.dcgan": ("DCGANDiscriminator", "DCGANGenerator"),
    "generative.vae": ("VAE",),
    "mlp": ("MLP",),
    "text.generation": ("generate",),
    "text.transformer_encoder": ("TransformerEncoder",),
    "text.transformer_lm": ("TransformerLM",),
    "vision.cnn": ("CNN",),
    "vision.convnext": ("ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny"),
    "vision.densenet": ("DenseNet121", "DenseNet169", "DenseNet201"),
    "vision.efficientnet": (
        "EfficientNetB0", "EfficientNetB1", "EfficientNetB2", "EfficientNetB3", "EfficientNetB4",
        "EfficientNetB5", "EfficientNetB6", "EfficientNetB7"),
    "vision.inception_v3": ("InceptionV3",),
    "vision.mobilenet": ("MobileNet",),
    "vision.mobilenet_v2": ("MobileNetV2",),
    "vision.mobilenet_v3": ("MobileNetV3Large", "MobileNetV3Small"),
    "vision.resnet": ("ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152"),
    "vision.resnet_v2": ("ResNet50V2", "ResNet101V2", "ResNet152V2"),
    "vision.unet": ("UNet",),
    "vision.vgg": ("VGG16", "VGG19"),
    "vision.vit": ("ViTB16", "ViTB32", "ViTL16", "ViTS16"),
    "vision.xception": ("Xception",),
    "weights.keras_weights": ("load_keras_weights",),
    "weights.preprocessing": ("preprocess_input",),
    "weights.torch_weights": ("load_torch_weights",),
}
_HOMES = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> _typing.Any:
    if name == "load_model":
        raise AttributeError("Models are loaded by `trainer.load_model(path, model=...)`.")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"trainer.models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
