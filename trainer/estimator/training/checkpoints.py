"""Checkpoints of an estimator: when `train` writes them, and how `train` and `evaluate` read them.

Owns the resume rule of `train`. After a finished call, the next call restores the state and starts the data over. After
an interrupted call, it resumes the whole run. The format on disk is in `engine/saving/checkpoint/`.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import warnings
from collections.abc import Sequence

import numpy as np

from trainer.callbacks import BackupAndRestore
from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.run_protocol import SavePoint, run_detail
from trainer.core import arguments, tree_paths
from trainer.core.train_state import TrainState
from trainer.core.types import Phase
from trainer.distribute import Strategy
from trainer.engine.loop.resumable_run import check_is_of_run, is_at_the_end
from trainer.engine.saving.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    is_checkpoint,
    open_checkpoint,
)
from trainer.estimator.training.hooks import CheckpointSaverListener, ScheduledSaveListener

STATE = "state"
GLOBAL_STEP = "global_step"
_STEP = "step"  # field of TrainState


class CheckpointSaver(BackupAndRestore):
    """Saves a run of `train` to the estimator's folder: at the start, periodically, and at the end.

    Args:
      model_dir: folder of the checkpoints.
      save_freq: number of steps since the start of the call, or a time; None disables saves between start and end.
      keep: number of checkpoints to keep; None for all.
      listeners: listeners to call around each checkpoint.
      has_ended: whether the newest checkpoint is from a finished call, so that the data start over.
    """

    state_attributes = ("_first_step",)
    run_folder = None  # an estimator trains many times in the same folder

    def __init__(self, model_dir: str, save_freq: int | datetime.timedelta | None, keep: int | None,
                 listeners: Sequence[CheckpointSaverListener], has_ended: bool):
        super().__init__(model_dir, save_freq or "epoch", delete_checkpoint=False)
        self._keep = keep or sys.maxsize
        self._listeners = listeners
        self._has_ended = has_ended
        self._first_step = 0
        self._saved_step: int | None = None
        self._is_leaving = False

    def on_save_point(self, point: SavePoint) -> None:
        if point.kind == "start":
            for listener in self._listeners:
                listener.begin()
        super().on_save_point(point)
        if point.kind == "start" and not self._has_ended and self._is_on_schedule(point):
            for listener in self._listeners:
                if isinstance(listener, ScheduledSaveListener):
                    listener.after_resume(self.model, point.batches)

    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        for listener in self._listeners:
            listener.end(self.model, self._point.batches)

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        if phase != "train" or not isinstance(self.save_freq, int):
            return None
        return batch + -(self._point.batches - self._first_step + 1) % self.save_freq

    def _restore(self, point: SavePoint) -> str | None:
        if self._has_ended:
            point.start_from(self._folder)
        else:
            try:
                return self._restored_or_begun(point)
            except CheckpointError:
                raise
            except ValueError as error:
                point.start_from(self._folder)
                warnings.warn(f"The last call of `train` was interrupted, and cannot go on where it was: {error} "
                              f"Weights and optimizer go on from step {point.batches}, and the data begin again.",
                              stacklevel=2)
        self._first_step = self._saved_step = point.batches
        return None

    def _restored_or_begun(self, point: SavePoint) -> str | None:
        resumed = point.restore(self._folder)
        if resumed is None:
            self._first_step = 0
            self._save(point)
        self._saved_step = point.batches
        return resumed

    def _is_due(self, point: SavePoint) -> bool:
        if point.kind == "epoch":
            return True  # a call has a single epoch
        if point.is_at_limit or self.save_freq == "epoch":
            return False
        if isinstance(self.save_freq, int):
            return point.kind == "batches" and self._is_on_schedule(point)
        is_due = time.monotonic() - self._saved_at >= self.save_freq.total_seconds()
        strategy: Strategy = self.model.strategy  # type: ignore[attr-defined]
        if not strategy.spans_processes:
            return is_due
        with run_detail(self.model, "timing").agreement():
            return strategy.process_group.any(is_due)

    def _is_on_schedule(self, point: SavePoint) -> bool:
        """Returns whether `save_freq` asks for a checkpoint of this step, or may have asked for it."""
        if isinstance(self.save_freq, int):
            return (point.batches - self._first_step) % self.save_freq == 0
        return self.save_freq != "epoch"

    def _save_and_exit(self) -> None:
        self._is_leaving = True
        super()._save_and_exit()

    def _save(self, point: SavePoint, wait: bool = False) -> bool:
        is_new = point.batches != self._saved_step
        called = [] if not is_new else [listener for listener in self._listeners
                                        if not (self._is_leaving and isinstance(listener, ScheduledSaveListener))]
        for listener in called:
            listener.before_save(self.model, point.batches)
        is_saved = point.save(self._folder, keep=self._keep, wait=wait or bool(self._listeners))
        self._saved_at, self._saved_step = time.monotonic(), point.batches
        if is_saved:
            for listener in called:
                if listener.after_save(self.model, point.batches):
                    self.model.stop_training = True
        return is_saved


def newest(model_dir: str) -> Checkpoint | None:
    """Returns the newest whole checkpoint of a folder; None if the folder has no checkpoints.

    Raises:
      CheckpointError: if the folder has checkpoints, but none of them is whole.
    """
    path = CheckpointFolder(model_dir).newest_whole()
    return None if path is None else _opened(path, verify=False)


def opened(path: str | os.PathLike[str]) -> Checkpoint:
    """Returns the training checkpoint at a path.

    Raises:
      TypeError: if `path` is not a path.
      FileNotFoundError: if there is no checkpoint.
      CheckpointError: if the checkpoint is damaged.
      ValueError: if the checkpoint is not from a training run, or `path` is a folder of checkpoints.
    """
    path = arguments.as_path("checkpoint_path", path, "the path of a checkpoint")
    folder = CheckpointFolder(path)
    if not is_checkpoint(path) and folder.steps():
        raise ValueError(f"`checkpoint_path` {path!r} is a folder of checkpoints. Give the path of one of them, such "
                         f"as {folder.path_of(folder.steps()[-1])!r}.")
    return _opened(path, verify=True)


def _opened(path: str, verify: bool) -> Checkpoint:
    checkpoint = open_checkpoint(path, verify)
    check_is_of_run(path, checkpoint.document)
    return checkpoint


def is_of_an_ended_call(checkpoint: Checkpoint) -> bool:
    """Returns whether a checkpoint is from the end of a `train` call."""
    return is_at_the_end(checkpoint.document)


def step_of(checkpoint: Checkpoint) -> int:
    """Returns the global step of a checkpoint."""
    return int(checkpoint.document["batches"])


def with_variables(checkpoint: Checkpoint, state: TrainState) -> TrainState:
    """Returns a training state with the arrays of a checkpoint, matched by name.

    Args:
      checkpoint: checkpoint to read. It may have additional arrays, such as an optimizer's state.
      state: state of the same module, with the target placement of the arrays.

    Raises:
      ValueError: if arrays are missing or have other shapes; the message lists them.
    """
    try:
        leaves = checkpoint.restore({**checkpoint.targets_here(), **tree_paths.named_leaves({STATE: state})})
    except CheckpointError as error:
        raise ValueError("The module or the optimizer of model_fn does not match the checkpoint. Make it as in the "
                         f"training, or give another `model_dir`. {error}") from None
    return tree_paths.with_leaves({STATE: state}, leaves)[STATE]


def variable_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the stored names of a checkpoint's state arrays, by public name."""
    prefix = f"{STATE}{tree_paths.SEPARATOR}"
    own = {name.removeprefix(prefix): name for name in checkpoint.specs if name.startswith(prefix)}
    return {GLOBAL_STEP if name == _STEP else name: stored for name, stored in own.items()}


def read_variables(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint's state, by public name."""
    arrays = checkpoint.restore(checkpoint.targets_here())
    return {name: np.asarray(arrays[stored]) for name, stored in variable_names(checkpoint).items()}
