"""Metrics, parameters and files in a run of Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.loggers.tracker import Tracker, missing_package


class Aim(Tracker):
    """Sends to a run of Aim. See `Tracker` for what becomes of a run.

    Files are copied to the folder "artifacts" of a local repository, if the run has no store for them.

    Args:
      experiment: the name of the experiment.
      repo: the folder or the address of Aim's repository; by default the working folder's.
      run: an `aim.Run` that is there already, to be used and left open; no other argument is given with it.
      **settings: more arguments of `aim.Run`, such as `capture_terminal_logs=False`.

    Raises:
      ImportError: if aim is not installed.
      ValueError: if `run` is given with arguments for another run.

    Example:

    >>> logger = Aim("digits", repo="runs")  # doctest: +SKIP

    Source: https://aimstack.readthedocs.io
    """

    def __init__(self, experiment: str | None = None, *, repo: str | os.PathLike[str] | None = None, run: Any = None,
                 **settings: Any):
        try:
            import aim
        except ImportError as error:
            raise missing_package("Aim", "aim", "aim") from error
        if repo is not None:
            settings["repo"] = os.fspath(repo)
        if experiment is not None:
            settings["experiment"] = experiment
        if run is not None and settings:
            raise ValueError(f"`run` is there already, so `Aim` takes no {', '.join(settings)} with it. Give them to "
                             "`aim.Run`.")
        super().__init__(run)
        self._aim, self._settings = aim, settings

    def _open(self, name: str | None) -> Any:
        return self._aim.Run(name, **self._settings)

    def _id_of(self, run: Any) -> str:
        return run.hash

    def _logged(self, run: Any) -> dict[str, int]:
        return {metric.name: int(metric.last_step()) for metric in run.metrics()}

    def _send_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            run.track(value, name=name, step=step)

    def _send_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run["hparams"] = dict(params)

    def _send_artifact(self, run: Any, path: str, name: str) -> None:
        if not run.artifacts_uri:
            run.set_artifacts_uri(f"file://{os.path.join(os.path.abspath(run.repo.root_path), 'artifacts')}")
        run.log_artifact(path, name)

    def _close(self, run: Any, failed: bool) -> None:
        if not failed:
            run.report_successful_finish()
        run.close()
