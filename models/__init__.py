"""Flax modules to train: published architectures, each in its own file, with the names of `keras.applications`.

They are plain Linen modules and know nothing of the trainer; any of them works with any Flax training loop.
"""

from trainer.models.generative.dcgan import DCGANDiscriminator, DCGANGenerator
from trainer.models.generative.vae import VAE
from trainer.models.mlp import MLP
from trainer.models.text.generation import generate
from trainer.models.text.transformer_encoder import TransformerEncoder
from trainer.models.text.transformer_lm import TransformerLM
from trainer.models.vision.cnn import CNN
from trainer.models.vision.mobilenet_v2 import MobileNetV2
from trainer.models.weights.keras_weights import load_keras_weights

__all__ = [
    "CNN",
    "MLP",
    "VAE",
    "DCGANDiscriminator",
    "DCGANGenerator",
    "MobileNetV2",
    "TransformerEncoder",
    "TransformerLM",
    "generate",
    "load_keras_weights",
]
