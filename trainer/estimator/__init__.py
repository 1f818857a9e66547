"""TensorFlow's Estimator on Flax modules: the same words, on `trainer.Model` and every strategy."""

from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from trainer.estimator.training.hooks import (
    CheckpointSaverListener,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from trainer.estimator.training.run_config import RunConfig
from trainer.estimator.training.spec import EstimatorSpec, ModeKeys
from trainer.estimator.training.train_and_evaluate import train_and_evaluate
from trainer.estimator.training.train_spec import EvalSpec, TrainSpec
from trainer.estimator.training.warm_start import WarmStartSettings

__all__ = [
    "BestExporter",
    "CheckpointSaverListener",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "ModeKeys",
    "RunConfig",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StopAtStepHook",
    "TrainSpec",
    "WarmStartSettings",
    "train_and_evaluate",
]
