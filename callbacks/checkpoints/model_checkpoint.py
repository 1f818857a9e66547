"""Saves of the model during training: periodic, best, or newest.

Owns the time and the name of each save, and the deletion of old files. The model writes the data.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import string
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from trainer.callbacks.base.callback import LogNames
from trainer.callbacks.base.monitor_callback import Mode, advice
from trainer.callbacks.checkpoints.periodic_saves import PeriodicSaves
from trainer.core.errors import see
from trainer.core.files import check_suffix, storage
from trainer.core.types import Verbose

_DEFAULT_MONITOR = "val_loss"


class ModelCheckpoint(PeriodicSaves):
    """Saves the model, or its weights, after epochs or after a number of batches.

    All processes call the model's methods; the first process makes folders and deletes files. New files are complete
    before old files are deleted. After `TerminateOnNaN` has found a NaN loss, nothing is written. `best`, the counts
    and the list of files resume with the run; as in Keras, another `fit` with the same instance continues them.

    Args:
      filepath: path of the file, or its URL in an object store. `{epoch}` and `{batch}`, counted from 1, and the names
        of logs are replaced, as in "weights-{epoch:02d}-{val_loss:.2f}.safetensors". Missing folders are created.
      monitor: name of the log that ranks the models; None for no ranking.
      verbose: 1 to print messages, 0 for no messages.
      save_best_only: whether to save only if the monitored value improves. An epoch without this value, such as an
        epoch without a validation, is not saved.
      save_weights_only: True to write the weights to a safetensors file. False to write the whole training state, to a
        file if `filepath` has a suffix, else to a folder.
      mode: "min", "max" or "auto" (see `MonitorCallback`).
      save_freq: "epoch" to save after each epoch, or a number of batches, counted over the epochs. Executions end at
        these batches; all other batches stay fused.
      initial_value_threshold: value that the first save must improve on, with `save_best_only`.
      max_to_keep: number of files of this callback to keep: the best by the monitored value, or the newest if no log
        has "val_loss", the default. A file that would not be kept is not written. None keeps all files.

    Attributes:
      best: best monitored value so far, with `save_best_only`.

    Raises:
      ValueError: if `save_freq` or `max_to_keep` is invalid, `save_best_only` is given without a monitor, or
        `filepath` has the suffix of another format, such as ".keras"; from `fit`, if no log at the saves has the
        monitor that decides about them, or if `mode` is "auto" and the direction is unknown.
      KeyError: from `fit`, if `filepath` names a log that a save will not have; before training if the logs are known
        by then.
      OSError: from `fit`, if a file cannot be written.

    Example:

    >>> from types import SimpleNamespace
    >>> checkpoint = ModelCheckpoint("weights-{epoch:02d}.safetensors", "loss", save_best_only=True,
    ...                              save_weights_only=True)
    >>> checkpoint.set_model(SimpleNamespace(save_weights=print))
    >>> for epoch, loss in enumerate([0.5, 0.6, 0.4]):
    ...     checkpoint.on_epoch_end(epoch, {"loss": loss})
    weights-01.safetensors
    weights-03.safetensors

    Source: Keras 3's callback of this name, without `max_to_keep`.
    """

    state_attributes = (*PeriodicSaves.state_attributes, "_kept", "_written")

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str | None = _DEFAULT_MONITOR,
        verbose: Verbose = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        max_to_keep: int | None = None,
    ):
        super().__init__("" if monitor is None else monitor, mode, initial_value_threshold, save_freq, verbose,
                         save_best_only, save_weights_only, max_to_keep)
        if save_best_only and monitor is None:
            raise ValueError("`save_best_only=True` needs a `monitor`, the name of the log that says which is best.")
        self.filepath = storage.as_place("filepath", filepath)
        check_suffix("filepath", self.filepath, ".safetensors", or_folder=not save_weights_only)
        _check_format(self.filepath)
        self._ranks = save_best_only or (monitor is not None and max_to_keep is not None)
        self._needs_monitor = self._ranks and (save_best_only or monitor != _DEFAULT_MONITOR)
        self._kept: list[list[Any]] = []  # [path, number, monitored value or None] of each file that is there
        self._written = 0  # files so far

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # The state comes from a file, so files outside of the callback's own folder are never deleted because of it.
        foreign = [entry[0] for entry in self._kept if not self._is_own(entry[0])]
        if foreign:
            warnings.warn(f"`ModelCheckpoint` resumes with files that do not lie in the folder {self._own_folder!r} of "
                          f"its `filepath`, and will not delete them: {foreign}.", UserWarning, stacklevel=2)
            self._kept = [entry for entry in self._kept if entry[0] not in foreign]

    @property
    def _own_folder(self) -> str:
        """Folder of all files of this callback: the folder of `filepath` up to the first replaced name."""
        return storage.real(os.path.dirname(self.filepath.partition("{")[0]))

    def _is_own(self, path: str) -> bool:
        folder, name = os.path.split(path)
        folder = storage.real(folder)  # of a link in the folder, only the link is deleted
        is_name = name not in ("", os.curdir, os.pardir)
        return is_name and f"{folder}/".startswith(f"{self._own_folder.rstrip('/')}/")

    def check_log_names(self, names: LogNames) -> None:
        """Rejects an unknown monitor, and a `filepath` with a name that not all saves have.

        Raises:
          ValueError: if the monitor decides about the saves, and no log has it.
          KeyError: if `filepath` has the name of another log.
        """
        super().check_log_names(names)
        if self.save_freq != "epoch":
            if names.batches is None:
                return
            known = names.batches | {"batch", "epoch"}
        elif self.save_best_only and self.monitor not in names.each_epoch:
            known = names.some_epochs | {"epoch"}  # saves only in epochs with a validation
        else:
            known = names.each_epoch | {"epoch"}
        for name in sorted(_fields(self.filepath) - known):
            error = self._format_error(name)  # with Keras's message
            if name in names.some_epochs:
                error.add_note(f"Not every save has the log {name!r}, which comes with a validation. Validate after "
                               "each epoch and save then, save the best of a log of the validation, or name one of: "
                               f"{', '.join(sorted(known))}. {see('monitor')}")
            else:
                error.add_note(f"No log has the name {name!r}. {advice(name, sorted(known), 'name')} {see('monitor')}")
            raise error

    def _save_if_due(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> None:
        value = self._monitored(batch, logs) if self._ranks else None
        if self.save_best_only and value is None:
            return  # Keras saves here, over the best that there is
        path = self._path(epoch, batch, logs)
        if value is not None and np.ndim(value) > 0:
            warnings.warn("Can save best model only when `monitor` is a scalar value. Received: an array of shape "
                          f"{np.shape(value)}. Falling back to `save_best_only=False`.", UserWarning, stacklevel=2)
            value = None
        elif not self._is_wanted(epoch, path, value):
            return
        self._save(path)
        self._note_kept(path, value)
        self._say(epoch, f"finished saving model to {path}")

    def _is_wanted(self, epoch: int, path: str, value: object) -> bool:
        if not self.save_best_only:
            if value is not None:
                self._set_monitor_op()
            if self._would_be_dropped(path, value):
                self._say(epoch, f"{self.monitor} is not among the best {self.max_to_keep}")
                return False
            self._say(epoch, f"saving model to {path}")
            return True
        best = "None" if self.best is None else f"{self.best:.5f}"
        if not self._improves(epoch, value):
            return False
        self._say(epoch, f"{self.monitor} improved from {best} to {value:.5f}, saving model to {path}")
        return True

    def _save(self, path: str) -> None:
        if jax.process_index() == 0:
            storage.make_folder(os.path.dirname(path))
        try:
            if self.save_weights_only:
                self.model.save_weights(path)
            else:
                self.model.save(path)
        except IsADirectoryError as error:
            raise IsADirectoryError("Please specify a non-directory filepath for ModelCheckpoint. Filepath used is an "
                                    f"existing directory: {path}") from error

    # --- names -----------------------------------------------------------------------------------------------------

    def _path(self, epoch: int, batch: int | None, logs: Any) -> str:
        numbers: dict[str, Any] = {"epoch": epoch + 1}
        if batch is not None and "batch" not in logs:
            numbers["batch"] = batch + 1
        try:
            # Unlike format, this reads only the named logs: reading a log waits for the device.
            return self.filepath.format_map(collections.ChainMap(numbers, logs))
        except KeyError as error:
            raise self._format_error(error.args[0]) from error

    def _format_error(self, name: str) -> KeyError:
        return KeyError(f'Failed to format this callback filepath: "{self.filepath}". Reason: {name!r}')

    # --- which files stay ------------------------------------------------------------------------------------------

    def _would_be_dropped(self, path: str, value: object) -> bool:
        others = [entry for entry in self._kept if entry[0] != path]
        if self.max_to_keep is None or len(others) < self.max_to_keep:
            return False
        return self._rank([path, self._written, value]) < min(map(self._rank, others))

    def _note_kept(self, path: str, value: Any) -> None:
        if self.max_to_keep is None:
            return
        self._kept = [entry for entry in self._kept if entry[0] != path]
        self._kept.append([path, self._written, None if value is None else float(value)])
        self._written += 1
        while len(self._kept) > self.max_to_keep:
            worst = min(self._kept[:-1], key=self._rank)
            self._kept.remove(worst)
            self._delete(worst[0])

    def _rank(self, entry: list[Any]) -> tuple[float, ...]:
        """Returns a sort key, lowest for the first file to delete: files without a value, then older files."""
        _, number, value = entry
        if value is None or math.isnan(value):
            return (0, number)
        # Of equal values the first stays, as with `save_best_only`.
        return (1, value if self.monitor_op is np.greater else -value, -number)


class _SampleValues(dict):
    """Trial values for a format string: a number for every name."""

    def __missing__(self, name: str) -> float:
        return 0.5


def _check_format(filepath: str) -> None:
    try:
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # of items and attributes of the numbers
            string.Formatter().vformat(filepath, (), _SampleValues(epoch=1, batch=1))
    except ValueError as error:
        raise ValueError("`filepath` is no format string of numbers by name, such as 'w-{epoch:02d}-{loss:.3f}'. "
                         f"Received: {filepath!r}. Python says: {error}.") from None


def _fields(filepath: str) -> set[str]:
    """Returns the names in a format string, without their attributes and indices."""
    fields = [field for _, field, _, _ in string.Formatter().parse(filepath) if field is not None]
    return {field.partition(".")[0].partition("[")[0] for field in fields}
