"""Optimizers with Keras's names and numbers, and optax transformations as they are."""

from trainer.optimizers import schedules
from trainer.optimizers.adagrad import Adadelta, Adagrad, Ftrl, RMSprop
from trainer.optimizers.adam import Adam, Adamax, AdamW, Lamb, Nadam
from trainer.optimizers.base import Optimizer, OptimizerState
from trainer.optimizers.large_models import Adafactor, Muon, ScheduleFreeAdamW
from trainer.optimizers.learning_rate import LearningRate
from trainer.optimizers.momentum import SGD, Lion
from trainer.optimizers.registry import deserialize, get, serialize
from trainer.optimizers.update_rule import LossScaleOptimizer

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "LearningRate",
    "Lion",
    "LossScaleOptimizer",
    "Muon",
    "Nadam",
    "Optimizer",
    "OptimizerState",
    "RMSprop",
    "ScheduleFreeAdamW",
    "deserialize",
    "get",
    "schedules",
    "serialize",
]
