"""The evaluations that a call of `train_and_evaluate` has made, to continue the call after its process was killed.

Owns a file in the folder of the estimator, which is there while a call is under way. Must not decide which checkpoints
are evaluated.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from trainer.engine.saving.checkpoint import processes
from trainer.estimator.training import notes

FILE_NAME = "evaluations.json"
EVALUATOR_FILE_NAME = "evaluator.json"  # of a process that only evaluates


class EvaluationRecord:
    """The course of a call, kept in a file so that another process can continue it.

    Args:
      model_dir: folder of the estimator.
      name: name of the file.

    Raises:
      ValueError: if the file has other content.

    Attributes:
      is_open: whether a call is under way, or was interrupted.
      first_step: step of the newest checkpoint before the call; None without a checkpoint.
      max_steps: the argument of the call.
      began_step: step of the evaluation that was begun last; None before the first.
      began_at: time when it was begun, in seconds since 1970.
      exports_before: number of the newest export at that time, by the exporter's name.
      step: step of the last whole evaluation, with its exports; None before the first.
      metrics: the metrics of that evaluation.
      exports: the results of its exporters.
    """

    def __init__(self, model_dir: str, name: str):
        self._path = os.path.join(model_dir, name)
        self._clear()
        if processes.from_first(lambda: "there" if os.path.exists(self._path) else ""):
            note = notes.read(self._path, "`train_and_evaluate`") or {}
            if unknown := sorted(note.keys() - vars(self).keys()):
                raise ValueError(f"{self._path!r} has entries that `train_and_evaluate` does not write: "
                                 f"{', '.join(unknown)}. Delete it.")
            vars(self).update(note)
            self.is_open = True

    def _clear(self) -> None:
        self.is_open = False
        self.first_step: int | None = None
        self.max_steps: int | None = None
        self.began_step: int | None = None
        self.began_at = 0.0
        self.exports_before: dict[str, int] = {}
        self.step: int | None = None
        self.metrics: dict[str, Any] | None = None
        self.exports: list[str | None] | None = None

    def begin(self, first_step: int | None, max_steps: int | None) -> None:
        """Notes that a call begins."""
        self._clear()
        self.is_open, self.first_step, self.max_steps = True, first_step, max_steps
        self._write()

    def resume(self, max_steps: int | None) -> None:
        """Notes that an interrupted call continues, to another end if the script says so."""
        self.max_steps = max_steps
        self._write()

    def begin_evaluation(self, step: int, exports_before: Mapping[str, int]) -> None:
        """Notes that a checkpoint is being evaluated."""
        self.began_step, self.began_at, self.exports_before = step, time.time(), dict(exports_before)
        self._write()

    def end_evaluation(self, metrics: Mapping[str, Any], exports: Sequence[str | None]) -> None:
        """Notes the results of the evaluation that was begun last."""
        self.step, self.metrics, self.exports = self.began_step, dict(metrics), list(exports)
        self._write()

    def close(self) -> None:
        """Removes the file: the call has ended. The results stay."""
        self.is_open = False
        _remove(self._path)

    def _write(self) -> None:
        if jax.process_index() == 0:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            notes.write(self._path, {name: value for name, value in vars(self).items()
                                     if name not in ("_path", "is_open")})


def forget(model_dir: str) -> None:
    """Removes the record of an interrupted call, because another training has gone on from it."""
    _remove(os.path.join(model_dir, FILE_NAME))


def _remove(path: str) -> None:
    if jax.process_index() == 0:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
