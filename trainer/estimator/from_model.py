"""Conversion of a compiled `Model` to an estimator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.core import errors
from trainer.core.calls.entry_points import explains_arguments
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.model import Model
from trainer.engine.model.overridable_steps import OverridableSteps
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.estimator_model import EstimatorModel
from trainer.estimator.training.run_config import RunConfig
from trainer.estimator.training.spec import EstimatorSpec, Mode

_OVERRIDABLE = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "apply")
_OF_SPEC = ("optimizer", "loss", "metrics", "weighted_metrics")


@explains_arguments
def model_to_estimator(
    model: Model,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    metric_names_map: Mapping[str, str] | None = None,
) -> Estimator:
    """Returns an estimator with a model's module, weights and arguments of `compile`.

    The model stays unchanged: the estimator trains copies. The strategy is `config.train_distribute`.

    Args:
      model: a compiled model with the default steps.
      model_dir, config: as in `Estimator`.
      metric_names_map: new names for the metrics of `evaluate`, by the model's names.

    Raises:
      TypeError: if `model` is not a `Model`, or an argument has the wrong type.
      ValueError: if the model is not compiled, or overrides a step.

    Example:
      >>> import trainer
      >>> from flax import linen as nn
      >>> model = trainer.Model(nn.Dense(1))
      >>> model.compile("sgd", "mse")
      >>> estimator = model_to_estimator(model)
      >>> x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
      >>> estimator.train(lambda: (x, y), steps=3).evaluate(lambda: (x, y), steps=1)["global_step"]
      3

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/keras/estimator/model_to_estimator
    """
    if not isinstance(model, Model):
        raise errors.wrong_type("model", model, "a compiled `trainer.Model`")
    if not core_of(model).configuration.is_compiled:
        raise ValueError("The given model has not been compiled. Call its `compile` first.")
    overridden = [name for name in _OVERRIDABLE if getattr(type(model), name) is not getattr(OverridableSteps, name)]
    if overridden:
        raise ValueError(f"The model overrides {', '.join(overridden)}, which an estimator would leave out. Use "
                         "`Model.fit`, or write a `model_fn`.")
    if metric_names_map is not None and not (
            isinstance(metric_names_map, Mapping)
            and all(isinstance(name, str) for pair in metric_names_map.items() for name in pair)):
        raise errors.wrong_type("metric_names_map", metric_names_map, "a dict of names by names, or None")
    return _ModelEstimator(model, model_dir, config, metric_names_map)


class _ModelEstimator(Estimator):
    """An estimator that starts from the weights of a model."""

    def __init__(self, model: Model, model_dir: str | os.PathLike[str] | None, config: RunConfig | None,
                 metric_names_map: Mapping[str, str] | None):
        given = dict(core_of(model).configuration.given)
        of_spec = {name: given.pop(name) for name in _OF_SPEC}
        self._weights: list[np.ndarray] | None = model.get_weights() if model.built else None
        self._names = dict(metric_names_map or {})

        def model_fn(features: Any, labels: Any, mode: Mode) -> EstimatorSpec:
            return EstimatorSpec(mode, module=model.module, compile_options=given, **of_spec)

        config = RunConfig() if config is None else config
        if isinstance(config, RunConfig) and config.tf_random_seed is None:
            config = config.replace(tf_random_seed=core_of(model).state.seed)
        super().__init__(model_fn, model_dir, config)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        logs = super().evaluate(*args, **kwargs)
        for name in self._names:
            if name not in logs:
                raise errors.unknown_name("metric in `metric_names_map`", name, logs)
        named = {self._names.get(name, name): value for name, value in logs.items()}
        if len(named) < len(logs):
            raise ValueError("`metric_names_map` gives two logs one name. The names of the logs: "
                             f"{', '.join(logs)}. Received: {dict(self._names)}.")
        return named

    def _begin(self, mode: Mode, model: EstimatorModel) -> None:
        if self._weights is not None:
            model.set_weights(self._weights)
