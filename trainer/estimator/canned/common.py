"""Shared parts of the canned estimators: optimizers, checks, and the `model_fn`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from trainer.core import errors
from trainer.core.types import PyTree
from trainer.engine.model.types import OptimizerLike, Optimizers
from trainer.estimator.feature_columns import FeatureColumn, HostTransform
from trainer.estimator.heads import BinaryClassHead, Head, MultiClassHead
from trainer.estimator.heads.base import LossReduction, WeightColumn
from trainer.estimator.training.spec import EstimatorSpec, Mode, ModeKeys, ModelFn
from trainer.optimizers import SGD, Adagrad, Adam, Ftrl, Optimizer, RMSprop
from trainer.optimizers.base import OptimizerState

OptimizerOrName = OptimizerLike | Callable[[], OptimizerLike]


class SparseFtrl(Ftrl):
    """Ftrl that skips weights with a zero gradient, such as weights of categories absent from a batch.

    It matches TensorFlow's sparse updates. Ftrl recomputes each weight from accumulated gradients, which would reset
    warm-started weights to 0.
    """

    def _transform(self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any]) -> Any:
        updates, inner = super()._transform(grads, state, params, extra)
        return jax.tree.map(lambda update, grad: jnp.where(grad == 0, 0, update), updates, grads), inner


# Optimizer names of TensorFlow's canned estimators.
_BY_NAME: dict[str, Callable[..., Optimizer]] = {
    "Adagrad": Adagrad, "Adam": Adam, "Ftrl": SparseFtrl, "RMSProp": RMSprop, "SGD": SGD}


def named_optimizer(optimizer: OptimizerOrName, learning_rate: float | None = None) -> OptimizerLike:
    """Returns an optimizer, from a name, an optimizer or a function.

    Args:
      optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD"; an optimizer as in `Model.compile`; or a function
        without arguments that returns an optimizer.
      learning_rate: learning rate of an optimizer given by name; None for Keras's default.

    Raises:
      ValueError: if the name is unknown.
    """
    if isinstance(optimizer, str):
        if optimizer not in _BY_NAME:
            raise errors.unknown_name("optimizer name", optimizer, _BY_NAME)
        return _BY_NAME[optimizer]() if learning_rate is None else _BY_NAME[optimizer](learning_rate=learning_rate)
    is_function = callable(optimizer) and not isinstance(optimizer, Optimizer) and not hasattr(optimizer, "update")
    return optimizer() if is_function else optimizer  # type: ignore[operator]


def linear_learning_rate(columns: Sequence[FeatureColumn], most: float) -> float:
    """Returns the learning rate of a linear model: `min(most, 1 / sqrt(number of columns))`."""
    return min(most, 1 / math.sqrt(len(columns)))


def checked_columns(argument: str, columns: object) -> list[FeatureColumn]:
    """Returns feature columns as a list.

    Raises:
      ValueError: if the list is empty.
      TypeError: if an element is not a feature column.
    """
    if isinstance(columns, FeatureColumn):
        columns = [columns]
    if isinstance(columns, str | Mapping) or not isinstance(columns, Iterable):
        raise errors.wrong_type(argument, columns, "a list of feature columns")
    columns = list(columns)
    for column in columns:
        if not isinstance(column, FeatureColumn):
            raise errors.wrong_type(argument, column, "feature columns of `trainer.estimator`, such as "
                                    "`numeric_column(\"age\")`")
    if not columns:
        raise ValueError(f"`{argument}` is empty. Give at least one feature column.")
    return columns


def classifier_head(n_classes: int, weight_column: WeightColumn, label_vocabulary: Sequence[str] | None,
                    loss_reduction: LossReduction) -> Head:
    """Returns the head of a classifier."""
    if n_classes == 2:
        return BinaryClassHead(weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction)
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)


def canned_model_fn(head: Head, columns: Sequence[FeatureColumn], module: nn.Module,
                    optimizer: Callable[[], Optimizers]) -> ModelFn:
    """Returns the `model_fn` of a canned estimator.

    Args:
      head: `Head` that computes loss, metrics and predictions from the logits.
      columns: all feature columns.
      module: module from the features of `HostTransform` to logits.
      optimizer: function that returns the optimizer.
    """
    transform: Callable[[Any], dict[str, Any]] = HostTransform(columns) if columns else _rows_alone

    def batch_map(features: Any, labels: Any) -> Any:
        numeric = transform(features)
        return (numeric, *head.labels_and_weights(features, labels))

    def model_fn(features: Any, labels: Any, mode: Mode) -> EstimatorSpec:
        if mode != ModeKeys.PREDICT and labels is None:
            raise ValueError("You must provide labels: input_fn returned features alone. Return `(features, labels)`.")
        return head.create_estimator_spec(mode, module, optimizer(), batch_map=batch_map)

    return model_fn


def _rows_alone(features: PyTree) -> dict[str, Any]:
    """Returns a single feature of zeros, which gives the number of rows to a model without feature columns."""
    return {"rows": np.zeros((len(jax.tree.leaves(features)[0]), 1), np.float32)}
