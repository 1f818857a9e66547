"""Deep estimators: `nn.Dense` layers over dense features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from trainer.core import arguments, errors
from trainer.core.types import PyTree
from trainer.estimator.canned.common import (
    OptimizerOrName,
    canned_model_fn,
    checked_columns,
    classifier_head,
    named_optimizer,
)
from trainer.estimator.canned.linear import Path
from trainer.estimator.feature_columns import DenseFeatures, FeatureColumn
from trainer.estimator.heads import Head, RegressionHead
from trainer.estimator.heads.base import LossReduction, WeightColumn, check_head
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.run_config import RunConfig
from trainer.estimator.training.warm_start import WarmStartSettings

Activation = Callable[[jax.Array], jax.Array]
BATCH_NORM_MOMENTUM, BATCH_NORM_EPSILON = 0.999, 1e-3


class DNNLogits(nn.Module):
    """Logits from hidden layers over dense features.

    Attributes:
      columns: dense feature columns.
      hidden_units: number of units of each hidden layer.
      units: number of logits per row.
      activation_fn: activation of the hidden layers.
      dropout: dropout rate of the hidden layers' outputs; None disables dropout.
      batch_norm: whether to normalize the hidden layers' outputs, after the activation and dropout.
    """

    columns: tuple[FeatureColumn, ...]
    hidden_units: tuple[int, ...]
    units: int
    activation_fn: Activation = nn.relu
    dropout: float | None = None
    batch_norm: bool = False

    @nn.compact
    def __call__(self, features: PyTree, training: bool = False) -> jax.Array:
        outputs = DenseFeatures(self.columns, name="input_layer")(features)
        for number, units in enumerate(self.hidden_units):
            layer = nn.Dense(units, kernel_init=nn.initializers.glorot_uniform(), name=f"hiddenlayer_{number}")
            outputs = self.activation_fn(layer(outputs))
            if self.dropout is not None:
                outputs = nn.Dropout(self.dropout, deterministic=not training)(outputs)
            if self.batch_norm:
                outputs = nn.BatchNorm(
                    use_running_average=not training, momentum=BATCH_NORM_MOMENTUM, epsilon=BATCH_NORM_EPSILON,
                    use_fast_variance=False, name=f"batchnorm_{number}")(outputs)
        return nn.Dense(self.units, kernel_init=nn.initializers.glorot_uniform(), name="logits")(outputs)


def dnn_logits(hidden_units: Any, columns: Sequence[FeatureColumn], units: int, activation_fn: Any, dropout: Any,
               batch_norm: Any) -> DNNLogits:
    """Returns the module for the arguments of an estimator.

    Raises:
      ValueError: if there are no layers, a layer has no units, or the dropout rate is outside [0, 1).
      TypeError: if an argument has the wrong type.
    """
    if isinstance(hidden_units, str) or not isinstance(hidden_units, Sequence) or not hidden_units:
        raise ValueError("`hidden_units` must be a list of at least one number of units, such as [64, 32]. Received: "
                         f"{errors.describe(hidden_units)}.")
    sizes = tuple(arguments.as_count("hidden_units", size) for size in hidden_units)
    if dropout is not None:
        arguments.require({"dropout": dropout}, "a rate in [0, 1), or None", lambda rate: 0 <= rate < 1)
    if not callable(activation_fn):
        raise errors.wrong_type("activation_fn", activation_fn, "a function of arrays, such as `nn.relu`")
    arguments.require_bool(batch_norm=batch_norm)
    return DNNLogits(tuple(columns), sizes, units, activation_fn, dropout, batch_norm)


class DNNEstimator(Estimator):
    """A deep model with a head.

    Args:
      head: `Head` that computes loss, metrics and predictions from the logits.
      hidden_units: number of units of each hidden layer.
      feature_columns: dense columns; wrap categorical columns in `embedding_column` or `indicator_column`.
      model_dir, config, warm_start_from: as in `Estimator`.
      optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD", with Keras's learning rate (0.001, SGD 0.01; in
        TensorFlow 1 it was 0.05); an optimizer; or a function that returns an optimizer.
      activation_fn: activation of the hidden layers.
      dropout: dropout rate of the hidden layers' outputs; None disables dropout.
      batch_norm: whether to normalize the hidden layers' outputs.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/DNNEstimator
    """

    def __init__(self, head: Head, hidden_units: Sequence[int], feature_columns: Sequence[FeatureColumn],
                 model_dir: Path | None = None, optimizer: OptimizerOrName = "Adagrad",
                 activation_fn: Activation = nn.relu, dropout: float | None = None, config: RunConfig | None = None,
                 warm_start_from: Path | WarmStartSettings | None = None, batch_norm: bool = False):
        columns = checked_columns("feature_columns", feature_columns)
        named_optimizer(optimizer)  # raises for an unknown name
        units = check_head(head).logits_dimension
        module = dnn_logits(hidden_units, columns, units, activation_fn, dropout, batch_norm)
        super().__init__(canned_model_fn(head, columns, module, lambda: named_optimizer(optimizer)), model_dir, config,
                         warm_start_from=warm_start_from)


class DNNRegressor(DNNEstimator):
    """Deep regression.

    Args:
      hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout, config, warm_start_from, batch_norm:
        as in `DNNEstimator`.
      label_dimension: number of values per label.
      weight_column: name of the feature with the weight of each row.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/DNNRegressor
    """

    def __init__(self, hidden_units: Sequence[int], feature_columns: Sequence[FeatureColumn],
                 model_dir: Path | None = None, label_dimension: int = 1, weight_column: WeightColumn = None,
                 optimizer: OptimizerOrName = "Adagrad", activation_fn: Activation = nn.relu,
                 dropout: float | None = None, config: RunConfig | None = None,
                 warm_start_from: Path | WarmStartSettings | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", batch_norm: bool = False):
        super().__init__(RegressionHead(label_dimension, weight_column, loss_reduction), hidden_units, feature_columns,
                         model_dir, optimizer, activation_fn, dropout, config, warm_start_from, batch_norm)


class DNNClassifier(DNNEstimator):
    """Deep classification.

    Args:
      hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout, config, warm_start_from, batch_norm:
        as in `DNNEstimator`.
      n_classes: number of classes.
      weight_column: name of the feature with the weight of each row.
      label_vocabulary: class names, for text labels.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/DNNClassifier
    """

    def __init__(self, hidden_units: Sequence[int], feature_columns: Sequence[FeatureColumn],
                 model_dir: Path | None = None, n_classes: int = 2, weight_column: WeightColumn = None,
                 label_vocabulary: Sequence[str] | None = None, optimizer: OptimizerOrName = "Adagrad",
                 activation_fn: Activation = nn.relu, dropout: float | None = None, config: RunConfig | None = None,
                 warm_start_from: Path | WarmStartSettings | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", batch_norm: bool = False):
        super().__init__(classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction), hidden_units,
                         feature_columns, model_dir, optimizer, activation_fn, dropout, config, warm_start_from,
                         batch_norm)
