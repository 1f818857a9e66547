"""Linear estimators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import jax
from flax import linen as nn

from trainer.core.types import PyTree
from trainer.estimator.canned.common import (
    OptimizerOrName,
    canned_model_fn,
    checked_columns,
    classifier_head,
    linear_learning_rate,
    named_optimizer,
)
from trainer.estimator.feature_columns import FeatureColumn, LinearFeatures
from trainer.estimator.heads import Head, RegressionHead
from trainer.estimator.heads.base import LossReduction, WeightColumn, check_head
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.run_config import RunConfig
from trainer.estimator.training.warm_start import WarmStartSettings

MOST_LEARNING_RATE = 0.2

Combiner = Literal["sum", "mean", "sqrtn"]
Path = str | os.PathLike[str]


class LinearLogits(nn.Module):
    """Logits that are linear in the features, with weights initialized to 0.

    Attributes:
      columns: feature columns.
      units: number of logits per row.
      sparse_combiner: reduction over the weights of a row's categories: "sum", "mean" or "sqrtn".
    """

    columns: tuple[FeatureColumn, ...]
    units: int
    sparse_combiner: Combiner = "sum"

    @nn.compact
    def __call__(self, features: PyTree) -> jax.Array:
        return LinearFeatures(self.columns, self.units, self.sparse_combiner, name="linear_model")(features)


class LinearEstimator(Estimator):
    """A linear model with a head.

    Args:
      head: `Head` that computes loss, metrics and predictions from the logits.
      feature_columns: columns of any kind except sequences.
      model_dir, config, warm_start_from: as in `Estimator`.
      optimizer: "Ftrl", "Adagrad", "Adam", "RMSProp" or "SGD", with learning rate
        `min(0.2, 1 / sqrt(number of columns))`; an optimizer; or a function that returns an optimizer.
      sparse_combiner: reduction over the weights of a row's categories: "sum", "mean" or "sqrtn".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/LinearEstimator
    """

    def __init__(self, head: Head, feature_columns: Sequence[FeatureColumn], model_dir: Path | None = None,
                 optimizer: OptimizerOrName = "Ftrl", config: RunConfig | None = None,
                 sparse_combiner: Combiner = "sum", warm_start_from: Path | WarmStartSettings | None = None):
        columns = checked_columns("feature_columns", feature_columns)
        rate = linear_learning_rate(columns, MOST_LEARNING_RATE)
        named_optimizer(optimizer, rate)  # raises for an unknown name
        module = LinearLogits(tuple(columns), check_head(head).logits_dimension, sparse_combiner)
        super().__init__(canned_model_fn(head, columns, module, lambda: named_optimizer(optimizer, rate)), model_dir,
                         config, warm_start_from=warm_start_from)


class LinearRegressor(LinearEstimator):
    """Linear regression.

    Args:
      feature_columns, model_dir, optimizer, config, warm_start_from, sparse_combiner: as in `LinearEstimator`.
      label_dimension: number of values per label.
      weight_column: name of the feature with the weight of each row.
      loss_reduction: "sum_over_batch_size", or "sum".

    Example:
      >>> import numpy as np
      >>> from trainer.estimator import numeric_column
      >>> regressor = LinearRegressor([numeric_column("x")], optimizer="SGD")
      >>> _ = regressor.train(lambda: ({"x": np.ones((4, 1))}, np.ones((4, 1))), steps=20)
      >>> float(next(regressor.predict(lambda: {"x": np.ones((1, 1))}))["predictions"].round(2)[0])
      1.0

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/LinearRegressor
    """

    def __init__(self, feature_columns: Sequence[FeatureColumn], model_dir: Path | None = None,
                 label_dimension: int = 1, weight_column: WeightColumn = None, optimizer: OptimizerOrName = "Ftrl",
                 config: RunConfig | None = None, warm_start_from: Path | WarmStartSettings | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", sparse_combiner: Combiner = "sum"):
        super().__init__(RegressionHead(label_dimension, weight_column, loss_reduction), feature_columns, model_dir,
                         optimizer, config, sparse_combiner, warm_start_from)


class LinearClassifier(LinearEstimator):
    """Linear classification.

    Args:
      feature_columns, model_dir, optimizer, config, warm_start_from, sparse_combiner: as in `LinearEstimator`.
      n_classes: number of classes.
      weight_column: name of the feature with the weight of each row.
      label_vocabulary: class names, for text labels.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/LinearClassifier
    """

    def __init__(self, feature_columns: Sequence[FeatureColumn], model_dir: Path | None = None, n_classes: int = 2,
                 weight_column: WeightColumn = None, label_vocabulary: Sequence[str] | None = None,
                 optimizer: OptimizerOrName = "Ftrl", config: RunConfig | None = None,
                 warm_start_from: Path | WarmStartSettings | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", sparse_combiner: Combiner = "sum"):
        super().__init__(classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction), feature_columns,
                         model_dir, optimizer, config, sparse_combiner, warm_start_from)
