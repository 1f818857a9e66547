"""RunConfig: the checkpoint folder, save and log intervals, strategies and the role of the process."""

from __future__ import annotations

import datetime
import os
from typing import Any, Literal

from trainer.core import arguments, errors
from trainer.distribute import Strategy
from trainer.distribute.cluster import TF_CONFIG, TFConfigClusterResolver

DEFAULT_SAVE_SECS = 600
_DEFAULT: Any = "default"
# Arguments of TensorFlow's RunConfig that have no meaning here.
_WITHOUT_MEANING = {
    "session_config": "there are no sessions: leave it out, and set devices by the strategy.",
    "keep_checkpoint_every_n_hours": "leave it out; `keep_checkpoint_max=None` keeps all checkpoints.",
    "device_fn": "leave it out; strategies place variables.",
    "protocol": "leave it out; there is no gRPC server to choose one for.",
    "experimental_distribute": "give `train_distribute` and `eval_distribute`.",
    "experimental_max_worker_delay_secs": "leave it out: workers wait for each other.",
    "session_creation_timeout_secs": "leave it out; strategies have `timeout_secs`.",
    "checkpoint_save_graph_def": "leave it out: checkpoints hold arrays only.",
    "master": "leave it out; TF_CONFIG or the strategy says where the processes are.",
}
_FIELDS = ("model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs",
           "keep_checkpoint_max", "log_step_count_steps", "train_distribute", "eval_distribute")


class RunConfig:
    """Immutable configuration of an `Estimator`; `replace` returns a changed copy.

    The constructor reads the role of the process from TF_CONFIG. Without TF_CONFIG, the process is the only worker and
    the chief.

    Args:
      model_dir: folder of checkpoints, exports and event files; None leaves the choice to the estimator.
      tf_random_seed: seed of the weights and all random streams; None means 0.
      save_summary_steps: number of steps between TensorBoard summaries of the loss, with tensorboardX; None disables
        them.
      save_checkpoints_steps: number of steps between checkpoints, from the start of a call.
      save_checkpoints_secs: number of seconds between checkpoints; 600 if neither is given. With None for both, only
        the start and the end of each `train` call are saved.
      keep_checkpoint_max: number of checkpoints to keep; None or 0 for all.
      log_step_count_steps: number of steps between log lines with loss and speed; None disables them.
      train_distribute: strategy of `train`; None for the current or default strategy.
      eval_distribute: strategy of `evaluate` and `predict`; None for the current or default strategy.

    Attributes:
      task_type: role of the process: "chief", "worker", "ps" or "evaluator".
      task_id: index of the process within its role.
      is_chief: whether this process is the chief, which writes shared files.
      num_ps_replicas: number of parameter servers; 0 for an evaluator.
      num_worker_replicas: number of training processes, including the chief; 0 for an evaluator.
      cluster_spec: addresses by role; empty without TF_CONFIG.

    Raises:
      ValueError: if a value is invalid, both save intervals are given, or an argument has no meaning here.
      TypeError: if an argument has the wrong type.
      ClusterError: if TF_CONFIG is invalid.

    Example:
      >>> config = RunConfig(save_checkpoints_steps=100)
      >>> config.save_checkpoints_secs is None, config.is_chief
      (True, True)
      >>> config.replace(model_dir="run").model_dir
      'run'

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/RunConfig
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | Literal["default"] | None = _DEFAULT,
        save_checkpoints_secs: float | Literal["default"] | None = _DEFAULT,
        keep_checkpoint_max: int | None = 5,
        log_step_count_steps: int | None = 100,
        train_distribute: Strategy | None = None,
        eval_distribute: Strategy | None = None,
        **without_meaning: Any,
    ):
        for name in without_meaning:
            if name in _WITHOUT_MEANING:
                raise ValueError(f"`RunConfig` has no `{name}`: {_WITHOUT_MEANING[name]}")
            raise TypeError(f"{errors.unknown_name('argument of `RunConfig`', name, _FIELDS)}")
        steps: Any = save_checkpoints_steps
        secs: Any = save_checkpoints_secs
        if steps is not _DEFAULT and secs is _DEFAULT:
            secs = None
        elif secs is not _DEFAULT and steps is _DEFAULT:
            steps = None
        elif steps is _DEFAULT:
            steps, secs = None, DEFAULT_SAVE_SECS
        if steps is not None and secs is not None:
            raise ValueError("`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set. Received: "
                             f"{steps!r} and {secs!r}. Leave one out.")
        self.model_dir: str | None = None
        if model_dir is not None:
            self.model_dir = arguments.as_path("model_dir", model_dir, "the path of a folder")
        self.tf_random_seed = None if tf_random_seed is None else arguments.as_seed("tf_random_seed", tf_random_seed)
        self.save_summary_steps = _optional_count("save_summary_steps", save_summary_steps)
        self.save_checkpoints_steps = _optional_count("save_checkpoints_steps", steps)
        if secs is not None:
            arguments.require_positive(save_checkpoints_secs=secs)
        self.save_checkpoints_secs: float | None = secs
        self.keep_checkpoint_max = _optional_count("keep_checkpoint_max", keep_checkpoint_max, 0) or None
        self.log_step_count_steps = _optional_count("log_step_count_steps", log_step_count_steps)
        self.train_distribute = _strategy("train_distribute", train_distribute)
        self.eval_distribute = _strategy("eval_distribute", eval_distribute)
        self._read_cluster()

    def _read_cluster(self) -> None:
        self.task_type, self.task_id, self.is_chief = "worker", 0, True
        self.num_ps_replicas, self.num_worker_replicas = 0, 1
        self.cluster_spec: dict[str, list[str]] = {}
        if TF_CONFIG not in os.environ:
            return
        cluster = TFConfigClusterResolver()
        self.task_type, self.task_id, self.is_chief = cluster.task_type, cluster.task_id, cluster.is_chief
        self.cluster_spec = cluster.cluster_spec()
        is_evaluator = self.task_type == "evaluator"
        self.num_ps_replicas = 0 if is_evaluator else len(self.cluster_spec.get("ps", ()))
        self.num_worker_replicas = 0 if is_evaluator else cluster.num_workers

    def replace(self, **changes: Any) -> RunConfig:
        """Returns a copy with changed arguments.

        Raises:
          ValueError: if a name is not an argument of `RunConfig`, or a value is invalid.
        """
        for name in changes:
            if name not in _FIELDS:
                raise ValueError(f"Replacing {name} is not supported. Allowed properties are {', '.join(_FIELDS)}.")
        values = {name: getattr(self, name) for name in _FIELDS}
        if "save_checkpoints_steps" in changes and "save_checkpoints_secs" not in changes:
            values["save_checkpoints_secs"] = None
        if "save_checkpoints_secs" in changes and "save_checkpoints_steps" not in changes:
            values["save_checkpoints_steps"] = None
        return RunConfig(**{**values, **changes})

    @property
    def seed(self) -> int:
        """Seed of the weights and all random streams."""
        return self.tf_random_seed or 0

    @property
    def save_freq(self) -> int | datetime.timedelta | None:
        """Interval between checkpoints, in steps or as a time; None disables saves between start and end of a call."""
        if self.save_checkpoints_secs is not None:
            return datetime.timedelta(seconds=self.save_checkpoints_secs)
        return self.save_checkpoints_steps

    def __repr__(self) -> str:
        return f"RunConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


def _optional_count(name: str, value: Any, minimum: int = 1) -> int | None:
    arguments.check_count(name, value, minimum, optional=True)
    return None if value is None else int(value)


def _strategy(name: str, value: object) -> Strategy | None:
    if value is not None and not isinstance(value, Strategy):
        raise errors.wrong_type(name, value, "a strategy of `trainer.distribute`, such as `MirroredStrategy()`")
    return value
