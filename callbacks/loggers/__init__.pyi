from trainer.callbacks.loggers.json_lines import JSONLines as JSONLines
from trainer.callbacks.loggers.log_to import LogTo as LogTo
from trainer.callbacks.loggers.logger import Logger as Logger, ResumableLogger as ResumableLogger
from trainer.callbacks.loggers.mlflow_run import MLflow as MLflow
from trainer.callbacks.loggers.tensorboard_files import TensorBoardFiles as TensorBoardFiles
from trainer.callbacks.loggers.tracker import Tracker as Tracker
from trainer.callbacks.loggers.wandb_run import WandB as WandB
