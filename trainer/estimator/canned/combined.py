"""Wide and deep estimators: the sum of the logits of a linear and a deep model."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import linen as nn

from trainer.core.types import PyTree
from trainer.engine.model.types import OptimizerLike
from trainer.estimator.canned.common import (
    OptimizerOrName,
    canned_model_fn,
    checked_columns,
    classifier_head,
    linear_learning_rate,
    named_optimizer,
)
from trainer.estimator.canned.dnn import Activation, DNNLogits, dnn_logits
from trainer.estimator.canned.linear import Combiner, LinearLogits, Path
from trainer.estimator.feature_columns import FeatureColumn
from trainer.estimator.heads import Head, RegressionHead
from trainer.estimator.heads.base import LossReduction, WeightColumn, check_head
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.run_config import RunConfig
from trainer.estimator.training.warm_start import WarmStartSettings

DNN_LEARNING_RATE = 0.001
MOST_LINEAR_LEARNING_RATE = 0.005


class CombinedLogits(nn.Module):
    """The sum of linear and deep logits.

    Attributes:
      linear: the linear part, or None.
      dnn: the deep part, or None.
    """

    linear: LinearLogits | None
    dnn: DNNLogits | None

    def __call__(self, features: PyTree, training: bool = False) -> jax.Array:
        parts = [] if self.linear is None else [self.linear(features)]
        if self.dnn is not None:
            parts.append(self.dnn(features, training=training))
        return sum(parts[1:], parts[0])


class DNNLinearCombinedEstimator(Estimator):
    """A linear and a deep model with one head and an optimizer per model.

    Args:
      head: `Head` that computes loss, metrics and predictions from the logits.
      model_dir, config, warm_start_from: as in `Estimator`.
      linear_feature_columns: columns of the linear part; None for no linear part.
      linear_optimizer: as in `LinearEstimator`; an optimizer given by name has the learning rate
        `min(0.005, 1 / sqrt(number of columns))`.
      dnn_feature_columns: columns of the deep part; None for no deep part.
      dnn_optimizer: as in `DNNEstimator`; an optimizer given by name has the learning rate 0.001.
      dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm: as in `DNNEstimator`.
      linear_sparse_combiner: as in `LinearEstimator`.

    Raises:
      ValueError: if both parts have no columns, or the deep part has columns but no layers.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/DNNLinearCombinedEstimator
    """

    def __init__(self, head: Head, model_dir: Path | None = None,
                 linear_feature_columns: Sequence[FeatureColumn] | None = None,
                 linear_optimizer: OptimizerOrName = "Ftrl",
                 dnn_feature_columns: Sequence[FeatureColumn] | None = None,
                 dnn_optimizer: OptimizerOrName = "Adagrad", dnn_hidden_units: Sequence[int] | None = None,
                 dnn_activation_fn: Activation = nn.relu, dnn_dropout: float | None = None,
                 config: RunConfig | None = None, batch_norm: bool = False, linear_sparse_combiner: Combiner = "sum",
                 warm_start_from: Path | WarmStartSettings | None = None):
        if not linear_feature_columns and not dnn_feature_columns:
            raise ValueError("Either linear_feature_columns or dnn_feature_columns must be defined.")
        units = check_head(head).logits_dimension
        linear, dnn = None, None
        optimizers: dict[str, tuple[OptimizerOrName, float]] = {}
        columns: list[FeatureColumn] = []
        if linear_feature_columns:
            wide = checked_columns("linear_feature_columns", linear_feature_columns)
            linear = LinearLogits(tuple(wide), units, linear_sparse_combiner)
            optimizers["linear"] = linear_optimizer, linear_learning_rate(wide, MOST_LINEAR_LEARNING_RATE)
            columns += wide
        if dnn_feature_columns:
            if not dnn_hidden_units:
                raise ValueError("dnn_hidden_units must be defined when dnn_feature_columns is specified.")
            deep = checked_columns("dnn_feature_columns", dnn_feature_columns)
            dnn = dnn_logits(dnn_hidden_units, deep, units, dnn_activation_fn, dnn_dropout, batch_norm)
            optimizers["dnn"] = dnn_optimizer, DNN_LEARNING_RATE
            columns += deep

        def made() -> dict[str, OptimizerLike]:
            return {name: named_optimizer(optimizer, rate) for name, (optimizer, rate) in optimizers.items()}

        made()  # raises for an unknown name
        module = CombinedLogits(linear, dnn)
        super().__init__(canned_model_fn(head, columns, module, made), model_dir, config,
                         warm_start_from=warm_start_from)


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """Wide and deep regression.

    Args:
      model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer, dnn_hidden_units,
        dnn_activation_fn, dnn_dropout, config, warm_start_from, batch_norm, linear_sparse_combiner: as in
        `DNNLinearCombinedEstimator`.
      label_dimension: number of values per label.
      weight_column: name of the feature with the weight of each row.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/DNNLinearCombinedRegressor
    """

    def __init__(self, model_dir: Path | None = None, linear_feature_columns: Sequence[FeatureColumn] | None = None,
                 linear_optimizer: OptimizerOrName = "Ftrl",
                 dnn_feature_columns: Sequence[FeatureColumn] | None = None,
                 dnn_optimizer: OptimizerOrName = "Adagrad", dnn_hidden_units: Sequence[int] | None = None,
                 dnn_activation_fn: Activation = nn.relu, dnn_dropout: float | None = None, label_dimension: int = 1,
                 weight_column: WeightColumn = None, config: RunConfig | None = None,
                 warm_start_from: Path | WarmStartSettings | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", batch_norm: bool = False,
                 linear_sparse_combiner: Combiner = "sum"):
        super().__init__(RegressionHead(label_dimension, weight_column, loss_reduction), model_dir,
                         linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer,
                         dnn_hidden_units, dnn_activation_fn, dnn_dropout, config, batch_norm,
                         linear_sparse_combiner, warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """Wide and deep classification.

    Args:
      model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer, dnn_hidden_units,
        dnn_activation_fn, dnn_dropout, config, warm_start_from, batch_norm, linear_sparse_combiner: as in
        `DNNLinearCombinedEstimator`.
      n_classes: number of classes.
      weight_column: name of the feature with the weight of each row.
      label_vocabulary: class names, for text labels.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/DNNLinearCombinedClassifier
    """

    def __init__(self, model_dir: Path | None = None, linear_feature_columns: Sequence[FeatureColumn] | None = None,
                 linear_optimizer: OptimizerOrName = "Ftrl",
                 dnn_feature_columns: Sequence[FeatureColumn] | None = None,
                 dnn_optimizer: OptimizerOrName = "Adagrad", dnn_hidden_units: Sequence[int] | None = None,
                 dnn_activation_fn: Activation = nn.relu, dnn_dropout: float | None = None, n_classes: int = 2,
                 weight_column: WeightColumn = None, label_vocabulary: Sequence[str] | None = None,
                 config: RunConfig | None = None, warm_start_from: Path | WarmStartSettings | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", batch_norm: bool = False,
                 linear_sparse_combiner: Combiner = "sum"):
        super().__init__(classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction), model_dir,
                         linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer,
                         dnn_hidden_units, dnn_activation_fn, dnn_dropout, config, batch_norm,
                         linear_sparse_combiner, warm_start_from)
