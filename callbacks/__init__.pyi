from trainer.callbacks import loggers as loggers
from trainer.callbacks.base.callback import Callback as Callback, adds_logs as adds_logs
from trainer.callbacks.base.lazy_logs import LazyLogs as LazyLogs
from trainer.callbacks.base.monitor_callback import MonitorCallback as MonitorCallback
from trainer.callbacks.base.run_protocol import Run as Run, RunDetails as RunDetails, SavePoint as SavePoint
from trainer.callbacks.callback_list import CallbackList as CallbackList, History as History
from trainer.callbacks.checkpoints.backup_and_restore import BackupAndRestore as BackupAndRestore
from trainer.callbacks.checkpoints.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from trainer.callbacks.checkpoints.orbax_checkpoint import OrbaxCheckpoint as OrbaxCheckpoint
from trainer.callbacks.csv_logger import CSVLogger as CSVLogger
from trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
from trainer.callbacks.lambda_callback import LambdaCallback as LambdaCallback
from trainer.callbacks.learning_rate_scheduler import LearningRateScheduler as LearningRateScheduler
from trainer.callbacks.loggers.log_to import LogTo as LogTo
from trainer.callbacks.profile import Profile as Profile
from trainer.callbacks.progress.progress_bar import ProgbarLogger as ProgbarLogger
from trainer.callbacks.record.run_record import RunRecord as RunRecord
from trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau as ReduceLROnPlateau
from trainer.callbacks.remote_monitor import RemoteMonitor as RemoteMonitor
from trainer.callbacks.skip_non_finite import SkipNonFinite as SkipNonFinite
from trainer.callbacks.spike_guard import SpikeGuard as SpikeGuard
from trainer.callbacks.swap_ema_weights import SwapEMAWeights as SwapEMAWeights
from trainer.callbacks.tensorboard.tensorboard import TensorBoard as TensorBoard
from trainer.callbacks.terminate_on_nan import TerminateOnNaN as TerminateOnNaN
from trainer.callbacks.throughput import Throughput as Throughput
from trainer.callbacks.validate_every import ValidateEvery as ValidateEvery
