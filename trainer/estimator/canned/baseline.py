"""Baseline estimators, which learn one value for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.core.types import PyTree
from trainer.estimator.canned.common import OptimizerOrName, canned_model_fn, classifier_head, named_optimizer
from trainer.estimator.canned.linear import Path
from trainer.estimator.heads import Head, RegressionHead
from trainer.estimator.heads.base import LossReduction, WeightColumn, check_head
from trainer.estimator.training.estimator import Estimator
from trainer.estimator.training.run_config import RunConfig

LEARNING_RATE = 0.3


class BaselineLogits(nn.Module):
    """The same learned logits for each row, initialized to 0.

    Attributes:
      units: number of logits per row.
    """

    units: int

    @nn.compact
    def __call__(self, features: PyTree) -> jax.Array:
        bias = self.param("bias", nn.initializers.zeros_init(), (self.units,))
        rows = jax.tree.leaves(features)[0].shape[0]
        return jnp.broadcast_to(bias, (rows, self.units))


class BaselineEstimator(Estimator):
    """An estimator that predicts one value for all rows, with a head. It ignores the features.

    Args:
      head: `Head` that computes loss, metrics and predictions from the logits.
      model_dir, config: as in `Estimator`.
      optimizer: "Ftrl", "Adagrad", "Adam", "RMSProp" or "SGD", with learning rate 0.3; an optimizer; or a function that
        returns an optimizer.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/BaselineEstimator
    """

    def __init__(self, head: Head, model_dir: Path | None = None, optimizer: OptimizerOrName = "Ftrl",
                 config: RunConfig | None = None):
        named_optimizer(optimizer, LEARNING_RATE)  # raises for an unknown name
        module = BaselineLogits(check_head(head).logits_dimension)
        super().__init__(canned_model_fn(head, (), module, lambda: named_optimizer(optimizer, LEARNING_RATE)),
                         model_dir, config)


class BaselineRegressor(BaselineEstimator):
    """Predicts the mean of the labels.

    Args:
      model_dir, optimizer, config: as in `BaselineEstimator`.
      label_dimension: number of values per label.
      weight_column: name of the feature with the weight of each row.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/BaselineRegressor
    """

    def __init__(self, model_dir: Path | None = None, label_dimension: int = 1, weight_column: WeightColumn = None,
                 optimizer: OptimizerOrName = "Ftrl", config: RunConfig | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size"):
        super().__init__(RegressionHead(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config)


class BaselineClassifier(BaselineEstimator):
    """Predicts the class frequencies.

    Args:
      model_dir, optimizer, config: as in `BaselineEstimator`.
      n_classes: number of classes.
      weight_column: name of the feature with the weight of each row.
      label_vocabulary: class names, for text labels.
      loss_reduction: "sum_over_batch_size", or "sum".

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/BaselineClassifier
    """

    def __init__(self, model_dir: Path | None = None, n_classes: int = 2, weight_column: WeightColumn = None,
                 label_vocabulary: Sequence[str] | None = None, optimizer: OptimizerOrName = "Ftrl",
                 config: RunConfig | None = None, loss_reduction: LossReduction = "sum_over_batch_size"):
        super().__init__(classifier_head(n_classes, weight_column, label_vocabulary, loss_reduction), model_dir,
                         optimizer, config)
