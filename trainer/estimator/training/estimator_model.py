"""The model of an estimator, built from a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from trainer.core import errors
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.arrays import Batch, as_batch
from trainer.distribute import Strategy, get_strategy
from trainer.engine.model.model import Model
from trainer.estimator.training.spec import EstimatorSpec
from trainer.metrics import Mean


class EstimatorModel(Model):
    """A model that reports the mean of the batch losses in `evaluate`, as in TensorFlow's estimators.

    `Model.evaluate` weights each batch by its rows, which differs if the last batch is smaller.

    Args:
      spec: spec of the model.
      seed: seed of the weights and all random streams.

    Attributes:
      output_names: names of the predictions that `predict_step` returns; None for all.
    """

    output_names: Sequence[str] | None = None

    def __init__(self, spec: EstimatorSpec, seed: int):
        super().__init__(spec.module, seed=seed)
        self._spec = spec
        self._batch_loss: Mean | None = None

    def test_step(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        y_pred, model_state = self.apply(state.params, state, x)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        loss = loss + self.compute_penalties(state.params, model_state)
        batch_loss = self._batch_loss = self._batch_loss or Mean(name="loss")
        batch_loss.update_state(loss)
        return {**self.compute_metrics(x, y, y_pred, sample_weight), "loss": batch_loss.result()}

    def predict_step(self, state: TrainState, batch: Batch) -> Any:
        outputs = super().predict_step(state, batch)
        if self._spec.predictions is not None:
            outputs = self._spec.predictions(outputs)
        if not jax.tree.leaves(outputs):
            raise ValueError("`predictions` of the spec must return arrays, rows first. Received: "
                             f"{errors.describe(outputs)}.")
        return outputs if self.output_names is None else _named(outputs, self.output_names)


def _named(outputs: PyTree, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(outputs, Mapping):
        raise ValueError(f"`export_outputs` names {', '.join(names)}, and the predictions are no dict. Give "
                         "`predictions` of the spec a function that returns one, or leave `export_outputs` out.")
    for name in names:
        if name not in outputs:
            raise errors.unknown_name("name in `export_outputs`", name, outputs)
    return {name: outputs[name] for name in names}


def make_model(spec: EstimatorSpec, strategy: Strategy | None, seed: int, features: PyTree) -> EstimatorModel:
    """Returns a built model of a spec, compiled if the spec has a loss.

    Args:
      spec: spec from `model_fn`.
      strategy: strategy of the model; None for the current or default strategy.
      seed: seed of the weights.
      features: some rows of the module's input.

    Raises:
      ValueError: if the features are not rows of numbers.
    """
    try:
        as_batch((features,))
    except ValueError as error:
        raise ValueError(f"The features of input_fn cannot be used: they are {errors.describe(features)}. {error} For "
                         "text, give the spec a `batch_map` that makes numbers of it, such as `HostTransform(columns)`."
                         ) from error
    with (strategy or get_strategy()).scope():
        model = EstimatorModel(spec, seed)
        if spec.loss is not None:
            model.compile(spec.optimizer, spec.loss, metrics=spec.metrics, weighted_metrics=spec.weighted_metrics,
                          **spec.compile_options)
    model.build(features)
    return model
