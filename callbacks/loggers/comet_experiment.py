"""Metrics, parameters and files in an experiment of Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.callbacks.loggers.tracker import Tracker, missing_package


class Comet(Tracker):
    """Sends to an experiment of Comet.

    Without arguments, that is the experiment that the program has open, if there is one. See `Tracker` for what becomes
    of it. Comet does not tell which steps an experiment has: those after the last save come again.

    Args:
      project_name: the name of the project.
      experiment: an experiment that is there already, such as `comet_ml.OfflineExperiment()`, to be used and left open;
        no other argument is given with it.
      **settings: more arguments of `comet_ml.start`, such as `workspace` or `online=False`.

    Raises:
      ImportError: if comet_ml is not installed.
      ValueError: if `experiment` is given with arguments for another.

    Example:

    >>> logger = Comet("digits", online=False)  # doctest: +SKIP

    Source: https://www.comet.com/docs/v2/
    """

    def __init__(self, project_name: str | None = None, *, experiment: Any = None, **settings: Any):
        try:
            import comet_ml
        except ImportError as error:
            raise missing_package("Comet", "comet_ml", "comet") from error
        if project_name is not None:
            settings["project_name"] = project_name
        if experiment is not None and settings:
            raise ValueError(f"`experiment` is there already, so `Comet` takes no {', '.join(settings)} with it. Give "
                             "them where it is made.")
        super().__init__(experiment)
        self._comet, self._settings = comet_ml, settings

    def _running(self) -> Any:
        return None if self._settings else self._comet.get_running_experiment()

    def _open(self, name: str | None) -> Any:
        going_on = {"mode": "create"} if name is None else {"mode": "get_or_create", "experiment_key": name}
        return self._comet.start(**{**self._settings, **going_on})

    def _id_of(self, run: Any) -> str:
        return run.get_key()

    def _send_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None:
        run.log_metrics(dict(metrics), step=step)

    def _send_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run.log_parameters(dict(params))

    def _send_artifact(self, run: Any, path: str, name: str) -> None:
        run.log_asset(path, file_name=name)

    def _close(self, run: Any, failed: bool) -> None:
        run.log_other("status", "failed" if failed else "finished")
        run.end()
