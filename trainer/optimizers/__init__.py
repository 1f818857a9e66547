"""Optimizers with Keras's names and numbers, and optax transformations as they are."""

from trainer.optimizers import schedules
from trainer.optimizers.adagrad import Adadelta, Adagrad, Ftrl, RMSprop
from trainer.optimizers.adam import Adam, Adamax, AdamW, Lamb, Nadam
from trainer.optimizers.base import Optimizer, OptimizerState
from trainer.optimizers.learning_rate import LearningRate
from trainer.optimizers.momentum import SGD, Lion
from trainer.optimizers.registry import get

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "LearningRate",
    "Lion",
    "Nadam",
    "Optimizer",
    "OptimizerState",
    "RMSprop",
    "get",
    "schedules",
]
