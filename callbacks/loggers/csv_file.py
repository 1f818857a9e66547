"""Metrics in a CSV file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from typing import Any

from trainer.core import arguments


class CSVFile:
    """Writes a row for each call of `log_metrics`: the step, then the metrics, empty where the call has none.

    Metrics with new names get columns of their own, for which the file is written again. Each row is on disk at once.
    The parameters go to a JSON file beside it: "log.csv" has "log.params.json". Artifacts stay where they are. A name
    that ends in ".tsv" has tabs in place of commas.

    A new run replaces the file. A run that resumes keeps the rows that it had when it was saved, and no others.

    Args:
      path: the file, such as "runs/first/log.csv"; its folder is made if it does not exist.

    Raises:
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

    def __init__(self, path: str | os.PathLike[str]):
        self.path = arguments.as_path("path", path)
        self._columns: list[str] = []
        self._rows = 0
        self._is_begun = False

    @property
    def folder(self) -> str:
        """The folder of the file."""
        return os.path.dirname(self.path) or os.curdir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes a row."""
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
        os.makedirs(self.folder, exist_ok=True)
        with open(f"{os.path.splitext(self.path)[0]}.params.json", "w", encoding="utf-8") as file:
            json.dump(dict(params), file, indent=2, default=str)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Does nothing: the artifact stays where it is."""

    def finish(self, failed: bool = False) -> None:
        """Lets the next run begin another file."""
        self._columns, self._rows, self._is_begun = [], 0, False

    def state_dict(self) -> dict[str, Any]:
        """Returns how many rows there are, and the names of their columns."""
        return {"rows": self._rows, "columns": list(self._columns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after so many rows; the rest go with the next row."""
        self._rows, self._columns, self._is_begun = state["rows"], list(state["columns"]), False

    def _writer(self, file: Any) -> csv.DictWriter:
        delimiter = "\t" if self.path.endswith(".tsv") else ","
        return csv.DictWriter(file, ["step", *self._columns], restval="", delimiter=delimiter, lineterminator="\n")

    def _kept_rows(self) -> list[dict[str, str]]:
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file, delimiter="\t" if self.path.endswith(".tsv") else ","))
        except FileNotFoundError:
            rows = []
        self._rows = min(self._rows, len(rows))
        return [{name: row.get(name) or "" for name in ("step", *self._columns)} for row in rows[:self._rows]]

    def _write_all(self, rows: list[dict[str, str]]) -> None:
        os.makedirs(self.folder, exist_ok=True)
        with open(f"{self.path}.tmp", "w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(f"{self.path}.tmp", self.path)
