"""Checkpoints of the model as it trains, written while it trains on: Keras's `OrbaxCheckpoint`.

Owns when to save, under which number, and which checkpoints to delete again. How one is written, and that it is whole
or not there, is the run's business.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.monitor_callback import Mode
from trainer.callbacks.base.run_protocol import run_of
from trainer.callbacks.checkpoints.periodic_saves import PeriodicSaves, delete
from trainer.core import arguments
from trainer.core.types import Verbose


class OrbaxCheckpoint(PeriodicSaves):
    """Saves the model to numbered checkpoints in a folder, of which the newest stay; training goes on meanwhile.

    A checkpoint is what `Model.save` writes to a folder, checked bit for bit when it is read, and not Orbax's own
    format. `trainer.load("run/7", model)` loads one, `trainer.load("run", model)` that of the largest number. Its name
    is the epoch's number from 0, or with a `save_freq` the number of batches so far, from the optimizer's `iterations`
    on. What the callback did not write it deletes in no case; a checkpoint of the same number is replaced.

    Nothing is written once `TerminateOnNaN` has found the loss to be no number. `best` and the counts resume with the
    run. To go on where a run was interrupted, data and callbacks included, use `BackupAndRestore`.

    Args:
      directory: the folder; made if it is not there.
      monitor: the name of the log that says which model is best, for `save_best_only`.
      verbose: 1 prints what the callback does, 0 does not.
      save_best_only: whether to save only if the monitored value is better than any before. Where it is missing,
        nothing is saved, with a warning if no log ever has it.
      mode: "min", "max" or "auto" (see `MonitorCallback`).
      save_freq: "epoch" saves after each epoch; an integer after so many batches, counted over the epochs. Executions
        end at these batches; all others stay fused.
      initial_value_threshold: the value that the first save must improve on, with `save_best_only`.
      max_to_keep: how many of the newest checkpoints to keep; None keeps all. One more is there while another is
        being written.
      save_on_background: whether a thread writes the checkpoint while the training goes on. The arrays are copied where
        they are, and a save waits for the one before. False waits for each.
      save_weights_only: True writes the weights alone, to safetensors files such as "run/7.safetensors", which
        `Model.load_weights` reads; the training waits for these.

    Attributes:
      best: the best monitored value so far, with `save_best_only`.

    Raises:
      ValueError: for values that cannot be used; from `fit`, if `mode` is "auto" and the direction is not known.
      TypeError: for arguments of a wrong type.
      OSError: from `fit` or `wait_until_finished`, if a checkpoint cannot be written.

    Example:

    >>> checkpoint = OrbaxCheckpoint("run", monitor="val_accuracy", save_best_only=True)
    >>> history = model.fit(x, y, validation_split=0.1, callbacks=[checkpoint])  # doctest: +SKIP
    >>> model = trainer.load("run", new_model())  # doctest: +SKIP

    Source: Keras 3's callback of this name.
    """

    state_attributes = (*PeriodicSaves.counters, "_batches", "_kept")

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
        if initial_value_threshold is not None:  # by this name, and not the base's
            arguments.require_number(initial_value_threshold=initial_value_threshold)
        super().__init__(monitor, mode, initial_value_threshold, save_freq, verbose)
        arguments.require_bool(save_best_only=save_best_only, save_on_background=save_on_background,
                               save_weights_only=save_weights_only)
        arguments.check_count("max_to_keep", max_to_keep, optional=True)
        self.directory = arguments.as_path("directory", directory, "the path of a folder for the checkpoints")
        self.save_best_only = save_best_only
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background
        self.save_weights_only = save_weights_only
        self._batches = 0
        self._kept: list[int] = []  # the numbers of the checkpoints that this callback wrote and are there
        self._monitor_comes = False  # whether some epoch's logs will have the monitor

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        each = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
        self._batches = max(int(getattr(part, "iterations", 0)) for part in each)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._kept = [arguments.as_count("_kept", number, 0) for number in self._kept]  # they name what is deleted

    def check_monitor(self, available: Iterable[str]) -> None:
        """Notes whether a log has the monitor: without it nothing is saved, or all without `save_best_only`."""
        self._monitor_comes = self.monitor in set(available)

    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        self._monitor_comes = False
        self.wait_until_finished()

    def release(self) -> None:
        if jax.process_count() > 1:
            return  # of several, others may not come
        try:
            self._wait()  # an exception may have ended the run
        except (OSError, ValueError) as error:
            warnings.warn(f"A checkpoint could not be written: {error}", UserWarning, stacklevel=2)

    def wait_until_finished(self) -> None:
        """Returns once the last checkpoint is written; deletes those that are not to stay.

        Raises:
          OSError: if it cannot be written.
        """
        self._wait()
        self._prune()

    def _count(self, batches: int) -> None:
        super()._count(batches)
        self._batches += batches

    def _save_if_due(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> None:
        if self.save_best_only:
            value = logs.get(self.monitor)
            if value is None or np.ndim(value):
                if not self._monitor_comes or value is not None or batch is not None:
                    warnings.warn(f"Can save best model only with {self.monitor} available as a number, skipping save "
                                  f"at {f'epoch {epoch}' if batch is None else f'batch {batch}'}.", UserWarning,
                                  stacklevel=2)
                return
            if self.monitor_op is None:
                self._set_monitor_op()
            if not self._is_improvement(value, self.best):
                self._say(epoch, f"{self.monitor} did not improve from {self.best:.5f}")
                return
            self.best = value
        number = epoch if batch is None else self._batches
        self.wait_until_finished()  # so that what is deleted is older than what is whole
        self._say(epoch, f"saving model to {self._path(number)}")
        self._save(self._path(number))
        self._kept = [*(other for other in self._kept if other != number), number]

    def _save(self, path: str) -> None:
        # A custom training loop may have a model that cannot save in the background.
        begin_save = getattr(run_of(self.model), "begin_save", None)
        if self.save_weights_only:
            if jax.process_index() == 0:
                os.makedirs(self.directory, exist_ok=True)
            self.model.save_weights(path)
        elif self.save_on_background and begin_save is not None:
            begin_save(path)
        else:
            self.model.save(path)

    def _wait(self) -> None:
        wait = getattr(run_of(getattr(self, "model", None)), "wait_for_save", None)
        if wait is not None:
            wait()

    def _prune(self) -> None:
        if self.max_to_keep is None:
            return
        old, self._kept = self._kept[:-self.max_to_keep], self._kept[-self.max_to_keep:]
        for number in old if jax.process_index() == 0 else ():
            delete(self._path(number), "OrbaxCheckpoint")

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"{number}.safetensors" if self.save_weights_only else str(number))
