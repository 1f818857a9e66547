"""Callbacks: what happens at the points of a training, besides training.

Owns the hooks (`Callback`), the calling of many together (`CallbackList`), and the callbacks that need nothing but the
model they are given. Imports nothing of the trainer: `Run` says what a callback may use of a model.
"""

from trainer.callbacks.base.callback import Callback, adds_logs
from trainer.callbacks.base.lazy_logs import LazyLogs
from trainer.callbacks.base.monitor_callback import MonitorCallback
from trainer.callbacks.base.run_protocol import Run, RunDetails, SavePoint
from trainer.callbacks.callback_list import CallbackList
from trainer.callbacks.checkpoints.backup_and_restore import BackupAndRestore
from trainer.callbacks.checkpoints.model_checkpoint import ModelCheckpoint
from trainer.callbacks.checkpoints.orbax_checkpoint import OrbaxCheckpoint
from trainer.callbacks.csv_logger import CSVLogger
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.history import History
from trainer.callbacks.lambda_callback import LambdaCallback
from trainer.callbacks.learning_rate_scheduler import LearningRateScheduler
from trainer.callbacks.loggers.log_to import LogTo
from trainer.callbacks.profile import Profile
from trainer.callbacks.progress.progress_bar import ProgressBar
from trainer.callbacks.record.run_record import RunRecord
from trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from trainer.callbacks.remote_monitor import RemoteMonitor
from trainer.callbacks.skip_non_finite import SkipNonFinite
from trainer.callbacks.swap_ema_weights import SwapEMAWeights
from trainer.callbacks.tensorboard.tensorboard import TensorBoard
from trainer.callbacks.terminate_on_nan import TerminateOnNaN
from trainer.callbacks.throughput import Throughput
from trainer.callbacks.validate_every import ValidateEvery

ProgbarLogger = ProgressBar  # Keras's name

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LazyLogs",
    "LearningRateScheduler",
    "LogTo",
    "ModelCheckpoint",
    "MonitorCallback",
    "OrbaxCheckpoint",
    "Profile",
    "ProgbarLogger",
    "ProgressBar",
    "ReduceLROnPlateau",
    "RemoteMonitor",
    "Run",
    "RunDetails",
    "RunRecord",
    "SavePoint",
    "SkipNonFinite",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "Throughput",
    "ValidateEvery",
    "adds_logs",
]
