"""A Keras-style trainer for Flax modules: the same numbers on any number of devices."""

from importlib.metadata import version as _version

from trainer import callbacks, data, distribute, losses, metrics, models, optimizers, testing
from trainer.compilation_cache import enable_compilation_cache
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.export import load_exported
from trainer.model import Model, Sequential
from trainer.saved_model import load
from trainer.state import TrainState

__version__ = _version("trainer-jax")

__all__ = [
    "Model",
    "Sequential",
    "TrainState",
    "callbacks",
    "data",
    "distribute",
    "enable_compilation_cache",
    "load",
    "load_exported",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "pack_x_y_sample_weight",
    "testing",
    "unpack_x_y_sample_weight",
]
