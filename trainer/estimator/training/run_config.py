"""RunConfig: where an estimator keeps its checkpoints, how often it saves, and what place its process has."""

from __future__ import annotations

import datetime
import os
from typing import Any, Literal

from trainer.cluster import TF_CONFIG, TFConfigClusterResolver
from trainer.core import arguments, errors
from trainer.distribute import Strategy

DEFAULT_SAVE_SECS = 600
_DEFAULT: Any = "default"
# Arguments of TensorFlow's RunConfig that stand for nothing here.
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
    """How an `Estimator` runs. It does not change once it is made; `replace` returns another.

    What TF_CONFIG says of this process is read when the object is made. Without TF_CONFIG it is the only worker, and
    the chief.

    Args:
      model_dir: the folder of checkpoints, exports and event files; None leaves the choice to the estimator.
      tf_random_seed: what weights and all random streams derive from; None is 0.
      save_summary_steps: every how many steps the loss is written for TensorBoard, with tensorboardX; None for never.
      save_checkpoints_steps: every how many steps, from the first of a call on, a checkpoint is written.
      save_checkpoints_secs: the same in seconds; 600 if neither is given. With None for both, the beginning and the end
        of each call of `train` are saved.
      keep_checkpoint_max: how many checkpoints stay; None or 0 for all.
      log_step_count_steps: every how many steps a line with the loss and the speed is logged; None for never.
      train_distribute: the strategy that `train` uses; None for that in scope, or the default.
      eval_distribute: the strategy that `evaluate` and `predict` use; likewise.

    Attributes:
      task_type: this process's role: "chief", "worker", "ps" or "evaluator".
      task_id: its number among those of its role.
      is_chief: whether this process writes what is written once.
      num_ps_replicas: how many parameter servers there are; 0 for an evaluator.
      num_worker_replicas: how many processes train, the chief among them; 0 for an evaluator.
      cluster_spec: the addresses of each role; empty without TF_CONFIG.

    Raises:
      ValueError: for values that cannot be used, both ways to save, or an argument that has no meaning here.
      TypeError: for values of a wrong type.
      ClusterError: if TF_CONFIG is set and wrong.

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
        """Returns a copy with other values of the arguments that are named.

        Raises:
          ValueError: for anything but the arguments of `RunConfig`; and as `RunConfig` does.
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
        """What weights and all random streams derive from."""
        return self.tf_random_seed or 0

    @property
    def save_freq(self) -> int | datetime.timedelta | None:
        """How often a checkpoint is written; None for never in the middle of a call."""
        if self.save_checkpoints_secs is not None:
            return datetime.timedelta(seconds=self.save_checkpoints_secs)
        return self.save_checkpoints_steps

    def __repr__(self) -> str:
        return f"RunConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


def _optional_count(name: str, value: Any, minimum: int = 1) -> int | None:
    arguments.check_count(name, value, minimum, optional=True)
    return None if value is None else int(value)


def _strategy(name: str, value: Any) -> Strategy | None:
    if value is not None and not isinstance(value, Strategy):
        raise errors.wrong_type(name, value, "a strategy of `trainer.distribute`, such as `MirroredStrategy()`")
    return value
