"""Loggers: where the numbers of a training go besides the terminal, and the callback that sends them there.

Owns the `Logger` protocol, a file of JSON lines, and adapters of packages that track experiments. A package is imported
when its logger is made. What a run is, in numbers and texts, comes from the model.
"""

from trainer.callbacks.loggers.json_lines import JSONLines
from trainer.callbacks.loggers.log_to import LogTo
from trainer.callbacks.loggers.logger import Logger, ResumableLogger
from trainer.callbacks.loggers.mlflow_run import MLflow
from trainer.callbacks.loggers.tensorboard_files import TensorBoardFiles
from trainer.callbacks.loggers.tracker import Tracker
from trainer.callbacks.loggers.wandb_run import WandB

__all__ = ["JSONLines", "LogTo", "Logger", "MLflow", "ResumableLogger", "TensorBoardFiles", "Tracker", "WandB"]
