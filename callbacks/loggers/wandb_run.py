"""Metrics, parameters and files in a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.callbacks.loggers.tracker import Tracker
from trainer.core.errors import missing_package


class WandB(Tracker):
    """Sends to a run of Weights & Biases.

    Without arguments, it uses the active run of `wandb.init()`, if any. `Tracker` describes the life of a run. A
    resumed run keeps its id; the server ignores steps that it already has.

    Args:
      project: name of the project.
      run: return value of `wandb.init`, which stays open; excludes the other arguments.
      **settings: other arguments of `wandb.init`, such as `name`, `group`, `tags` or `mode="offline"`.

    Raises:
      ImportError: if wandb is not installed.
      ValueError: if `run` is given together with arguments for another run.

    Example:

    >>> logger = WandB("digits", mode="offline")  # doctest: +SKIP

    Source: https://docs.wandb.ai
    """

    def __init__(self, project: str | None = None, *, run: Any = None, **settings: Any):
        try:
            import wandb
        except ImportError as error:
            raise missing_package("WandB", "wandb", "wandb") from error
        if project is not None:
            settings["project"] = project
        if run is not None and settings:
            raise ValueError(f"`run` is there already, so `WandB` takes no {', '.join(settings)} with it. Give them to "
                             "`wandb.init`.")
        super().__init__(run)
        self._wandb, self._settings = wandb, settings

    def _running(self) -> Any:
        return None if self._settings else self._wandb.run

    def _open(self, name: str | None) -> Any:
        going_on = {} if name is None else {"id": name, "resume": "allow"}
        return self._wandb.init(**{"reinit": "create_new", **self._settings, **going_on})

    def _id_of(self, run: Any) -> str:
        return run.id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends metrics of steps that the run does not have yet."""
        run = self._open_run()
        if not self._is_resumed or step >= run.starting_step:
            self._send_metrics(run, metrics, step)

    def _send_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None:
        run.log(dict(metrics), step=step)

    def _send_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run.config.update(dict(params), allow_val_change=True)

    def _send_artifact(self, run: Any, path: str, name: str) -> None:
        artifact = self._wandb.Artifact(f"run-{run.id}-{_allowed(name)}", type="file")
        artifact.add_file(path, name=name)
        run.log_artifact(artifact)

    def _close(self, run: Any, failed: bool) -> None:
        run.finish(exit_code=int(failed))


def _allowed(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
