"""Writing the logs of every epoch to a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from typing import Any

from trainer.callbacks.callback import Callback, adds_logs


class CSVLogger(Callback):
    """Writes one row for each epoch: its number, from 0, and its logs, in the order of their names.

    The first epoch's logs decide the columns. If it had no validation, each column gets a "val_" twin. A value that an
    epoch does not have is written as "NA". Rows are on disk when the epoch ends.

    Args:
      filename: the path of the file; its folder must exist.
      separator: the string between two values.
      append: True adds to a file that exists, without a second header; False replaces it.

    Attributes:
      keys: the names of the columns after the first.

    Raises:
      OSError: from `fit`, if the file cannot be written.

    Example:

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "log.csv"
    >>> logger = CSVLogger(path)
    >>> logger.on_train_begin()
    >>> logger.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.6})
    >>> logger.on_train_end()
    >>> path.read_text()
    'epoch,loss,val_loss\\n0,0.5,0.6\\n'
    """

    def __init__(self, filename: str | os.PathLike, separator: str = ",", append: bool = False):
        self.filename = os.fspath(filename)
        self.sep = separator
        self.append = append
        self.csv_file: Any = None
        self.writer: csv.DictWriter | None = None
        self.keys: list[str] = []

    def on_train_begin(self, logs=None):
        self._close()  # an exception may have ended the last fit
        mode = "a" if self.append else "w"
        self.csv_file = open(self.filename, mode, newline="", encoding="utf-8")  # noqa: SIM115  Open for the whole fit.
        self.writer = None

    @adds_logs()
    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        if self.writer is None:
            self.keys = sorted(logs)
            if not any(key.startswith("val_") for key in self.keys):
                self.keys += [f"val_{key}" for key in self.keys]
            self.writer = csv.DictWriter(self.csv_file, fieldnames=["epoch", *self.keys], delimiter=self.sep)
            if self.csv_file.tell() == 0:
                self.writer.writeheader()
        self.writer.writerow({"epoch": epoch} | {key: _cell(logs.get(key, "NA")) for key in self.keys})
        self.csv_file.flush()

    def on_train_end(self, logs=None):
        self._close()

    def _close(self) -> None:
        if self.csv_file is not None:
            self.csv_file.close()


def _cell(value: Any) -> Any:
    """Returns what stands in a cell: a list as "[1, 2]" in quotes, a number or a text as it is."""
    if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0:
        return f'"[{", ".join(map(str, value))}]"'
    return value
