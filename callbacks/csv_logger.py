"""A CSV file with the logs of every epoch."""

from __future__ import annotations

import csv
import io
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.callbacks.base.callback import Callback, LogNames, Logs, adds_logs
from trainer.callbacks.base.run_protocol import run_detail
from trainer.core import arguments
from trainer.core.errors import MAX_ITEMS, brief, wrong_type
from trainer.core.files import open_file, open_log, storage

LOGGER = logging.getLogger(__name__)
_MOST_HEADER_BYTES = 2**20


class CSVLogger(Callback):
    """Writes a CSV row for each epoch: the epoch's index, from 0, and its logs, sorted by name.

    The first epoch's logs set the columns. Without a validation in the first epoch, each column gets a "val_" twin.
    Missing values are written as "NA". With `append=True`, an existing file keeps its columns; a log without a column
    is refused, before training if the names of the logs are known by then. Rows are on disk at the end of the epoch.
    With several processes, the first process writes.

    A resumed run continues its file: rows of epochs that will be repeated are cut off, so that the file ends as if
    there had been no interruption. The same holds for a run with `BackupAndRestore` that was killed before its first
    checkpoint and starts again. With `append=True`, the rows are moved to `filename + ".cut"` and a warning is logged,
    because another run may have added them.

    Args:
      filename: path of the file, or its URL in an object store, to which the whole file is written after each epoch.
        Missing folders are created.
      separator: string between two values.
      append: True to add to an existing file, without a second header; False to replace it at the first row.

    Attributes:
      keys: names of the columns after the first; None before the first row.

    Raises:
      IsADirectoryError: if `filename` is a folder.
      OSError: from `fit`, if the file cannot be written.
      ValueError: from `fit`, with `append=True`, if the file has other columns than the logs.

    Example:

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "log.csv"
    >>> logger = CSVLogger(path)
    >>> logger.on_train_begin()
    >>> logger.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.6})
    >>> logger.on_train_end()
    >>> path.read_text()
    'epoch,loss,val_loss\\n0,0.5,0.6\\n'

    Source: Keras 3's callback of this name.
    """

    runs_on = "chief"
    state_attributes = ("keys", "_end")
    csv_file: Any = None

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False):
        self.filename = storage.as_file("filename", filename)
        if not isinstance(separator, str):
            raise wrong_type("separator", separator, "one character")
        if len(separator) != 1 or separator in '\r\n"':
            raise ValueError("`separator` must be one character, and neither a quote nor the end of a line. "
                             f"Received: separator={separator!r}.")
        self.sep = separator
        arguments.require_bool(append=append)
        self.append = append
        self.writer: csv.DictWriter | None = None
        self.keys: list[str] | None = None
        self._validation_names: list[str] = []  # logs of a validation that are known before
        self._end = 0  # bytes of the file up to the last row, or before the first row
        self._replaces = False  # whether the first row replaces the content, which is of another run

    def check_log_names(self, names: LogNames) -> None:
        self._validation_names = sorted(name for name in names.some_epochs if name.startswith("val_"))
        if self.append:
            self._check_columns(names.some_epochs)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._close()  # an exception may have ended the last fit
        storage.make_folder(os.path.dirname(self.filename))
        # Not truncated yet: a resumed run, whose state is loaded later, continues its rows.
        self.csv_file = io.TextIOWrapper(open_log(self.filename), newline="", encoding="utf-8")
        self.writer = self.keys = None
        self._replaces = not self.append
        self._end = self._size() if self.append else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "csv_file": None, "writer": None}  # of this process

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        size = self._size()
        if size < self._end:
            warnings.warn(f"`CSVLogger` resumes, but {self.filename!r} does not have the rows of the epochs before. "
                          "Those from here on are added to it.", UserWarning, stacklevel=2)
        self._end = min(self._end, size)
        self._replaces = False
        self._cut()

    def snapshot_side_effects(self) -> dict[str, Any] | None:
        return {"file": storage.absolute(self.filename), "end": self._end} if self.append else None

    def rollback_side_effects(self, note: Mapping[str, Any]) -> None:
        if self.append and note["file"] == storage.absolute(self.filename) and 0 <= note["end"] <= self._size():
            self._end = note["end"]
            self._cut()

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = logs or {}
        self._replace()
        if self.keys is None and self.append:
            self.keys = self._check_columns(logs)
        if self.keys is None:
            self.keys = sorted(logs)
            if not any(key.startswith("val_") for key in self.keys):
                sets = run_detail(self.model, "validation_sets", ())
                prefixes = [f"val_{name}_" for name in sets] or ["val_"]
                self.keys += [f"{prefix}{key}" for prefix in prefixes for key in self.keys]
                self.keys += [name for name in self._validation_names if name not in self.keys]
        if self.writer is None:
            self.writer = csv.DictWriter(self.csv_file, fieldnames=["epoch", *self.keys], delimiter=self.sep)
            if self._size() == 0:
                self.writer.writeheader()
        self.writer.writerow({"epoch": epoch} | {key: _cell(logs.get(key, "NA")) for key in self.keys})
        self.csv_file.flush()
        self._end = self._size()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._replace()
        self._close()

    def __del__(self):
        self._close()  # an exception may have ended the fit

    def _check_columns(self, names: Iterable[str]) -> list[str] | None:
        """Returns the columns of the file after the first, or None if it has no content.

        Raises:
          ValueError: if the content is of another form, or a name has no column.
        """
        if not storage.is_file(self.filename):
            return None  # no such file yet, or a device, which has no columns
        with open_file(self.filename) as file:
            begin = file.read(_MOST_HEADER_BYTES).decode(errors="replace")
        try:
            header = next(csv.reader(io.StringIO(begin, newline=""), delimiter=self.sep), None)
        except csv.Error as error:
            raise ValueError(f"{self.filename!r} is no file that `CSVLogger` has written: {error}. Give the name of a "
                             "new file, or `append=False` to replace it.") from error
        if header is None:
            return None
        received = (f"Received: {self.filename!r}, which begins with the columns "
                    f"{', '.join(brief(repr(name)) for name in header[:MAX_ITEMS])}")
        if header[0] != "epoch":
            raise ValueError("`CSVLogger(append=True)` must be given a new file, or one that it has written with this "
                             f"separator. {received}. Give the name of a new file, or `append=False` to replace it.")
        missing = sorted(set(names).difference(header))
        if missing:
            raise ValueError("`CSVLogger(append=True)` must be given a file that has a column for each log. "
                             f"{received}, and none for {', '.join(missing[:MAX_ITEMS])}. Give the name of a new file, "
                             "or `append=False` to replace it.")
        return header[1:]

    def _replace(self) -> None:
        if self._replaces:
            self._replaces = False
            self._cut()

    def _cut(self) -> None:
        if self._size() <= self._end:  # a device such as /dev/null cannot be cut
            return
        if self.append:
            with open_file(self.filename) as file, open_log(f"{self.filename}.cut") as kept:
                file.seek(self._end)
                kept.write(file.read())
            LOGGER.warning("CSVLogger goes on after byte %d of %r, and has moved the rows behind it to %r.", self._end,
                           self.filename, f"{self.filename}.cut")
        self.csv_file.truncate(self._end)

    def _size(self) -> int:
        if storage.is_remote(self.filename):
            return self.csv_file.buffer.getbuffer().nbytes
        return os.fstat(self.csv_file.fileno()).st_size

    def _close(self) -> None:
        if self.csv_file is not None:
            self.csv_file.close()


def _cell(value: object) -> Any:
    """Returns the content of a cell: a list as "[1, 2]" in quotes, a number or a text unchanged."""
    if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0:
        return f'"[{", ".join(map(str, value))}]"'
    return value
