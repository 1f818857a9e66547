"""Checkpoints of the model that are written during training: Keras's `OrbaxCheckpoint`.

Owns the time and the number of each save, and the deletion of old checkpoints. The run writes a checkpoint atomically.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.log_values import optimizers_of
from trainer.callbacks.base.monitor_callback import Mode
from trainer.callbacks.base.run_protocol import Run, run_detail
from trainer.callbacks.checkpoints.periodic_saves import PeriodicSaves
from trainer.core import arguments
from trainer.core.errors import missing_package
from trainer.core.types import Verbose


class OrbaxCheckpoint(PeriodicSaves):
    """Saves the model to numbered checkpoints in a folder and keeps the newest, while training continues.

    A checkpoint is a step of Orbax's `CheckpointManager`, of a single tree that `ocp.args.StandardRestore` restores:
    the training state, with paths such as `params/Dense_0/kernel`. Beside it are checksums, with which `trainer.load`
    verifies it bit for bit. `trainer.load("run/7", model)` loads a checkpoint, and `trainer.load("run", model)` loads
    the checkpoint with the largest number; `Model.load_weights` takes the same paths. A checkpoint's name is the index
    of the epoch, from 0, or with a `save_freq` the number of batches so far, counted from the optimizer's `iterations`.
    The callback deletes only its own checkpoints, and replaces a checkpoint of the same number.

    After `TerminateOnNaN` has found a NaN loss, nothing is written. `best` and the counts resume with the run. To
    resume an interrupted run, including data and callbacks, use `BackupAndRestore`.

    Args:
      directory: folder of the checkpoints; created if missing. Not in an object store, where a checkpoint of Orbax
        would not appear in one step; `ModelCheckpoint` saves there.
      monitor: name of the log that ranks the models, for `save_best_only`.
      verbose: 1 to print messages, 0 for no messages.
      save_best_only: whether to save only if the monitored value improves. An epoch without this value, such as an
        epoch without a validation, is not saved.
      mode: "min", "max" or "auto" (see `MonitorCallback`).
      save_freq: "epoch" to save after each epoch, or a number of batches, counted over the epochs. Executions end at
        these batches; all other batches stay fused.
      initial_value_threshold: value that the first save must improve on, with `save_best_only`.
      max_to_keep: number of newest checkpoints to keep; None keeps all. During a save there is one more checkpoint.
      save_on_background: whether a thread writes the checkpoint while training continues. The arrays are copied on
        their devices, and each save waits for the previous save. False waits for each save.
      save_weights_only: True to write only the weights, to safetensors files such as "run/7.safetensors", which
        `Model.load_weights` reads; training waits for these saves.

    Attributes:
      best: best monitored value so far, with `save_best_only`.

    Raises:
      ValueError: for invalid values; from `fit`, with `save_best_only`, if no log at the saves has the monitor, or if
        `mode` is "auto" and the direction is unknown.
      TypeError: for arguments of a wrong type.
      OSError: from `fit` or `wait_until_finished`, if a checkpoint cannot be written.
      ImportError: if orbax-checkpoint is not installed, unless only weights are saved.

    Example:

    >>> checkpoint = OrbaxCheckpoint("run", monitor="val_accuracy", save_best_only=True)
    >>> history = model.fit(x, y, validation_split=0.1, callbacks=[checkpoint])  # doctest: +SKIP
    >>> model = trainer.load("run", new_model())  # doctest: +SKIP

    Source: Keras 3's callback of this name.
    """

    state_attributes = (*PeriodicSaves.state_attributes, "_batches", "_kept")

    def __init__(
        self,
        directory: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: Verbose = 0,
        save_best_only: bool = False,
        mode: Mode = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
        save_weights_only: bool = False,
    ):
        super().__init__(monitor, mode, initial_value_threshold, save_freq, verbose, save_best_only, save_weights_only,
                         max_to_keep)
        arguments.require_bool(save_on_background=save_on_background)
        self.directory = arguments.as_path("directory", directory, "the path of a folder for the checkpoints")
        if not save_weights_only and importlib.util.find_spec("orbax") is None:
            raise missing_package("OrbaxCheckpoint", "orbax-checkpoint", "orbax")
        self.save_on_background = save_on_background
        self._batches = 0
        self._kept: list[int] = []  # the numbers of the checkpoints that this callback wrote and are there

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        self._batches = max((int(optimizer.iterations) for optimizer in optimizers_of(model).values()), default=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._kept = [arguments.as_count("_kept", number, 0) for number in self._kept]  # checkpoints to delete

    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        self.wait_until_finished()

    def release(self) -> None:
        if jax.process_count() > 1:
            return  # of several, others may not come
        try:
            self._wait()  # an exception may have ended the run
        except (OSError, ValueError) as error:
            warnings.warn(f"A checkpoint could not be written: {error}", UserWarning, stacklevel=2)

    def wait_until_finished(self) -> None:
        """Waits until the last checkpoint is written, then deletes old checkpoints.

        Raises:
          OSError: if the checkpoint cannot be written.
        """
        self._wait()
        self._prune()

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        self._batches += last - first + 1
        super()._after_batches(first, last, logs)

    def _save_if_due(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> None:
        if self.save_best_only:
            value = self._monitored(batch, logs)
            if value is None:
                return
            if np.ndim(value):
                warnings.warn(f"Can save best model only with {self.monitor} available as a number, skipping save at "
                              f"{f'epoch {epoch}' if batch is None else f'batch {batch}'}.", UserWarning, stacklevel=2)
                return
            if not self._improves(epoch, value):
                return
        number = epoch if batch is None else self._batches
        self.wait_until_finished()  # so that only checkpoints older than a complete checkpoint are deleted
        self._say(epoch, f"saving model to {self._path(number)}")
        self._save(self._path(number))
        self._kept = [*(other for other in self._kept if other != number), number]

    def _save(self, path: str) -> None:
        begin_save = run_detail(self.model, "begin_save")
        if self.save_weights_only:
            if jax.process_index() == 0:
                os.makedirs(self.directory, exist_ok=True)
            self.model.save_weights(path)
        elif begin_save is None:
            self.model.save(path)
        else:
            begin_save(path)
            if not self.save_on_background:
                self._wait()

    def _wait(self) -> None:
        run_detail(self.model, "wait_for_save", lambda: None)()

    def _prune(self) -> None:
        if self.max_to_keep is None:
            return
        old, self._kept = self._kept[:-self.max_to_keep], self._kept[-self.max_to_keep:]
        for number in old:
            self._delete(self._path(number))

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"{number}.safetensors" if self.save_weights_only else str(number))
