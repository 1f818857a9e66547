"""Callbacks: actions at given points of training, evaluation and prediction.

Owns the hooks (`Callback`), the calls of several callbacks (`CallbackList`), and the callbacks that need only the model
they are given. Imports only rooms of `core` from the trainer: `Run` is the interface between callbacks and the model.
"""

from trainer.core.calls.public_names import attach_stub

_WANDB = "Instead: `LogTo(loggers.WandB(project=...))`."
_FOREIGN_NAMES = {
    "WandbLogger": _WANDB, "WandbCallback": _WANDB, "WandbMetricsLogger": _WANDB,
    "MLFlowLogger": "Instead: `LogTo(loggers.MLflow())`.",
    "TensorBoardLogger": "Instead: `TensorBoard(log_dir)`.",
    "LearningRateMonitor": "Instead: `LearningRateScheduler`, which logs the rate, or `TensorBoard`.",
    **dict.fromkeys(("ProgressBar", "TQDMProgressBar", "RichProgressBar"), "`fit(verbose=1)` shows a bar."),
    **dict.fromkeys(("ModelSummary", "RichModelSummary"), "Instead: `print(model.summary())`."),
    **dict.fromkeys(("EMA", "ExponentialMovingAverage", "StochasticWeightAveraging"),
                    "Instead: `compile(ema_decay=0.999)`."),
    **dict.fromkeys(("GradientAccumulator", "GradientAccumulationScheduler"),
                    "Instead: `Adam(0.001, gradient_accumulation_steps=4)`."),
    "Checkpoint": "Instead: `ModelCheckpoint(path)` keeps weights, `BackupAndRestore(folder)` resumes a run.",
    "Timer": "Instead: `fit(max_time=seconds)`.",
}

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=_FOREIGN_NAMES)
