"""Metrics, parameters and files in a run of MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.loggers.tracker import Tracker, missing_package
from trainer.core import arguments

MAX_VALUE_LENGTH = 500  # of a parameter, which every version of the server takes
MAX_PARAMS = 100  # of one request


class MLflow(Tracker):
    """Sends to a run of MLflow, with a request for each call.

    Without arguments, that is the run that `mlflow.start_run()` has begun, if there is one. See `Tracker` for what
    becomes of a run.

    Args:
      experiment: the name of the experiment, which is made if there is none; by default MLflow's own.
      run_name: the name of the run; by default MLflow makes one.
      tracking_uri: where the server, folder or database is; by default where MLflow's settings say.
      tags: tags of the run, by name.
      run_id: a run that is there already, to be used and left open.

    Raises:
      ImportError: if MLflow is not installed.

    Example:

    >>> logger = MLflow("digits", tracking_uri="sqlite:///mlflow.db")  # doctest: +SKIP

    Source: https://mlflow.org
    """

    def __init__(self, experiment: str | None = None, *, run_name: str | None = None, tracking_uri: str | None = None,
                 tags: Mapping[str, str] | None = None, run_id: str | None = None):
        try:
            import mlflow
        except ImportError as error:
            raise missing_package("MLflow", "mlflow") from error
        given = {"experiment": experiment, "run_name": run_name, "tracking_uri": tracking_uri, "run_id": run_id}
        arguments.require_text(**{name: value for name, value in given.items() if value is not None})
        super().__init__(run_id)
        self._mlflow = mlflow
        self._experiment, self._run_name, self._tags = experiment, run_name, dict(tags or {})
        self._tracking_uri = tracking_uri
        self._uses_running = experiment is run_name is tracking_uri is None and not tags

    @property
    def client(self) -> Any:
        """The `mlflow.MlflowClient` that sends."""
        return self._mlflow.MlflowClient(self._tracking_uri)

    def _running(self) -> str | None:
        active = self._mlflow.active_run() if self._uses_running else None
        return None if active is None else active.info.run_id

    def _open(self, name: str | None) -> str:
        client = self.client
        if name is not None:
            client.update_run(name, status="RUNNING")
            return name
        return client.create_run(self._experiment_id(client), run_name=self._run_name, tags=self._tags).info.run_id

    def _experiment_id(self, client: Any) -> str:
        if self._experiment is None:
            from mlflow.tracking.fluent import _get_experiment_id  # also of `mlflow.set_experiment` and the environment

            return _get_experiment_id()
        found = client.get_experiment_by_name(self._experiment)
        return client.create_experiment(self._experiment) if found is None else found.experiment_id

    def _id_of(self, run: str) -> str:
        return run

    def _logged(self, run: str) -> dict[str, int]:
        client = self.client
        return {name: max(metric.step for metric in client.get_metric_history(run, name))
                for name in client.get_run(run).data.metrics}

    def _send_metrics(self, run: str, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(run, metrics=[
            self._mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()])

    def _send_params(self, run: str, params: Mapping[str, Any]) -> None:
        all_params = [self._mlflow.entities.Param(name, str(value)[:MAX_VALUE_LENGTH])
                      for name, value in params.items()]
        for first in range(0, len(all_params), MAX_PARAMS):
            self.client.log_batch(run, params=all_params[first:first + MAX_PARAMS])

    def _send_artifact(self, run: str, path: str, name: str) -> None:
        # MLflow's artifacts keep their names.
        self.client.log_artifact(run, path)

    def _close(self, run: str, failed: bool) -> None:
        self.client.set_terminated(run, "FAILED" if failed else "FINISHED")
