"""Metrics in a CSV file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.loggers.own_file import as_file_path, ready_file
from trainer.core import arguments


class CSVFile:
    """Writes a row for each call of `log_metrics`: the step, then the metrics, empty where the call has none.

    Metrics with new names get columns of their own, for which the file is written again. Each row is on disk at once.
    The parameters go to a JSON file beside it: "log.csv" has "log.params.json". Artifacts stay where they are. A name
    that ends in ".tsv" has tabs in place of commas.

    A new run starts the file again: what another `fit` has written there goes, unless `append=True`. A run that resumes
    keeps the rows that it had when it was saved, with those that were there before it, and no others.

    Args:
      path: the file, such as "runs/first/log.csv"; its folder is made if it does not exist. Where a link lies, the file
        that it leads to is written.
      append: True keeps the rows of a file that exists, and adds those of this run; False replaces them. Rows of a run
        that is started again before its first checkpoint are kept, too. The parameters are those of the last run.

    Raises:
      IsADirectoryError: if there is a folder at the path.
      ValueError: if there is something else than a file; from the methods, if rows are to be added to a file that no
        `CSVFile` wrote.
      OSError: from the methods, if a file cannot be written.

    Example:

    >>> import pathlib
    >>> log = CSVFile("run/log.csv")
    >>> log.log_params({"optimizer": "adam"})
    >>> log.log_metrics({"loss": 0.5}, step=0)
    >>> log.log_metrics({"loss": 0.25, "val_loss": 0.5}, step=1)
    >>> log.finish()
    >>> print(pathlib.Path("run/log.csv").read_text())
    step,loss,val_loss
    0,0.5,
    1,0.25,0.5
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False):
        self.path = as_file_path("path", path)
        arguments.require_bool(append=append)
        self.append = append
        self._columns: list[str] = []
        self._rows = 0
        self._has_earlier = not append  # whether the rows that were there before are counted
        self._is_begun = False

    @property
    def folder(self) -> str:
        """The folder of the file."""
        return os.path.dirname(self.path) or os.curdir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes a row."""
        self._count_earlier()
        new = [name for name in metrics if name not in self._columns]
        if new or not self._is_begun:
            kept = self._kept_rows() if self._rows else []
            self._columns += new
            self._write_all(kept)
            self._is_begun = True
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            self._writer(file).writerow({"step": step, **metrics})
        self._rows += 1

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Writes the parameters beside the file."""
        ready_file(self.path)
        self._count_earlier()
        os.makedirs(self.folder, exist_ok=True)
        with open(f"{os.path.splitext(self.path)[0]}.params.json", "w", encoding="utf-8") as file:
            json.dump(dict(params), file, indent=2, default=str)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Does nothing: the artifact stays where it is."""

    def finish(self, failed: bool = False) -> None:
        """Lets the next run begin."""
        self._columns, self._rows, self._has_earlier, self._is_begun = [], 0, not self.append, False

    def state_dict(self) -> dict[str, Any]:
        """Returns how many rows there are, and the names of their columns."""
        self._count_earlier()
        return {"rows": self._rows, "columns": list(self._columns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after so many rows; the rest go with the next row."""
        self._rows, self._columns = state["rows"], list(state["columns"])
        self._has_earlier, self._is_begun = True, False

    @property
    def _delimiter(self) -> str:
        return "\t" if self.path.endswith(".tsv") else ","

    def _writer(self, file: Any) -> csv.DictWriter:
        return csv.DictWriter(file, ["step", *self._columns], restval="", delimiter=self._delimiter,
                              lineterminator="\n")

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Returns the names of the columns that the file has, and its rows; none if there is no file."""
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file, delimiter=self._delimiter)
                return list(reader.fieldnames or []), list(reader)
        except FileNotFoundError:
            return [], []

    def _count_earlier(self) -> None:
        if self._has_earlier:
            return
        columns, rows = self._read()
        if columns and (columns[0] != "step" or len(set(columns)) < len(columns)):
            raise ValueError(f"`append` adds rows to a file of `CSVFile`, whose first column is 'step'. Received: "
                             f"{self.path!r} with the columns {', '.join(map(repr, columns))}. Give another path.")
        self._columns, self._rows, self._has_earlier = columns[1:], len(rows), True

    def _kept_rows(self) -> list[dict[str, str]]:
        _, rows = self._read()
        self._rows = min(self._rows, len(rows))
        return [{name: row.get(name) or "" for name in ("step", *self._columns)} for row in rows[:self._rows]]

    def _write_all(self, rows: list[dict[str, str]]) -> None:
        target = ready_file(self.path)
        with open(f"{target}.tmp", "w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(f"{target}.tmp", target)
