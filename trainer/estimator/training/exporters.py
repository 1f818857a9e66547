"""Exporters: which checkpoints `train_and_evaluate` exports, and which exports it keeps."""

from __future__ import annotations

import abc
import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from trainer.core import arguments, errors
from trainer.estimator.training import notes, serving
from trainer.estimator.training.checkpoints import GLOBAL_STEP
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.events import LOGGER
from trainer.estimator.training.functions import check_receiver

EvalResult = Mapping[str, Any]
Receiver = Callable[[], Any]
_BEST = "best.json"


class Exporter(abc.ABC):
    """Base class of exporters, called after each evaluation; subclasses override `name` and `export`."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the folder in "export", unique among exporters."""

    @abc.abstractmethod
    def export(self, estimator: Estimator, export_path: str, checkpoint_path: str, eval_result: EvalResult,
               is_the_final_export: bool) -> str | None:
        """Exports the estimator if desired; returns the path of the export, or None.

        Args:
          estimator: the trained estimator.
          export_path: folder of the exporter's exports.
          checkpoint_path: the evaluated checkpoint.
          eval_result: result of `evaluate`.
          is_the_final_export: whether the training has ended.
        """


class _SavedModelExporter(Exporter):
    def __init__(self, name: str, serving_input_receiver_fn: Receiver):
        if not isinstance(name, str) or not name:
            raise errors.wrong_type("name", name, "a name that is not empty")
        check_receiver(serving_input_receiver_fn)
        self._name, self._receiver = name, serving_input_receiver_fn

    @property
    def name(self) -> str:
        return self._name

    def _exported(self, estimator: Estimator, export_path: str, checkpoint_path: str) -> str:
        return estimator.export_saved_model(export_path, self._receiver, checkpoint_path=checkpoint_path)


class FinalExporter(_SavedModelExporter):
    """Exports once, at the end of the training.

    Args:
      name: name of the export folder.
      serving_input_receiver_fn: as in `Estimator.export_saved_model`.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/FinalExporter
    """

    def export(self, estimator: Estimator, export_path: str, checkpoint_path: str, eval_result: EvalResult,
               is_the_final_export: bool) -> str | None:
        return self._exported(estimator, export_path, checkpoint_path) if is_the_final_export else None


class LatestExporter(_SavedModelExporter):
    """Exports after each evaluation.

    Args:
      name: name of the export folder.
      serving_input_receiver_fn: as in `Estimator.export_saved_model`.
      exports_to_keep: number of most recent exports to keep; None keeps all.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/LatestExporter
    """

    def __init__(self, name: str, serving_input_receiver_fn: Receiver, exports_to_keep: int | None = 5):
        super().__init__(name, serving_input_receiver_fn)
        arguments.check_count("exports_to_keep", exports_to_keep, optional=True)
        self._keep = exports_to_keep

    def export(self, estimator: Estimator, export_path: str, checkpoint_path: str, eval_result: EvalResult,
               is_the_final_export: bool) -> str | None:
        path = self._exported(estimator, export_path, checkpoint_path)
        _keep_newest(export_path, self._keep)
        return path


class BestExporter(_SavedModelExporter):
    """Exports after each evaluation that beats all earlier evaluations, including evaluations before an interruption.

    Args:
      name: name of the export folder.
      serving_input_receiver_fn: as in `Estimator.export_saved_model`.
      compare_fn: function `(best_eval_result, current_eval_result)` that returns whether the current result is better.
        By default, a smaller loss is better.
      exports_to_keep: number of most recent exports to keep; None keeps all.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/BestExporter
    """

    def __init__(self, name: str = "best_exporter", serving_input_receiver_fn: Receiver | None = None,
                 compare_fn: Callable[[EvalResult, EvalResult], bool] | None = None,
                 exports_to_keep: int | None = 5):
        super().__init__(name, serving_input_receiver_fn)  # type: ignore[arg-type]
        arguments.check_count("exports_to_keep", exports_to_keep, optional=True)
        if compare_fn is not None and not callable(compare_fn):
            raise errors.wrong_type("compare_fn", compare_fn, "a function (best_eval_result, current_eval_result)")
        self._is_better = compare_fn or _has_less_loss
        self._keep = exports_to_keep

    def export(self, estimator: Estimator, export_path: str, checkpoint_path: str, eval_result: EvalResult,
               is_the_final_export: bool) -> str | None:
        note = os.path.join(export_path, _BEST)
        best = notes.read(note, "`BestExporter`")
        with errors.naming_file(note):
            for key, value in (best or {}).items():
                arguments.as_number(errors.brief(key), value)
        result = _numbers(eval_result)
        if GLOBAL_STEP in result and json.dumps(best) == json.dumps(result):  # NaN is NaN
            made = serving.exports_in(export_path)
            if made:  # by a process that was killed before this method returned
                _keep_newest(export_path, self._keep)
                return made[-1]
        if best is not None and not self._is_better(best, eval_result):
            return None
        LOGGER.info("Performing best model export.")
        path = self._exported(estimator, export_path, checkpoint_path)
        notes.write(note, result)  # after the export: a run killed in between exports again
        _keep_newest(export_path, self._keep)
        return path


def _has_less_loss(best: EvalResult, current: EvalResult) -> bool:
    for result in (best, current):
        if "loss" not in result:
            raise ValueError("`BestExporter` compares the loss, which the evaluation has not. Give a `compare_fn`.")
    return bool(best["loss"] > current["loss"])


def _keep_newest(folder: str, count: int | None) -> None:
    if count is not None:
        for path in serving.exports_in(folder)[:-count]:
            shutil.rmtree(path)


def _numbers(result: EvalResult) -> dict[str, float]:
    return {name: float(value) for name, value in result.items() if getattr(value, "shape", ()) == ()}
