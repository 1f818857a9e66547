"""Flax modules to train: published architectures, each in its own file, with the names of `keras.applications`.

They are plain Linen modules and know nothing of the trainer; any of them works with any Flax training loop.
"""

from trainer.models.cnn import CNN
from trainer.models.mlp import MLP

__all__ = ["CNN", "MLP"]
