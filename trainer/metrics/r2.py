"""The coefficient of determination."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core.types import ArrayLike
from trainer.metrics.arrays import as_table_pair, check_table, divide_no_nan, full_weights
from trainer.metrics.base import Metric

AGGREGATIONS = (None, "uniform_average", "variance_weighted_average")


class R2Score(Metric):
    """The share of the labels' variance that the predictions explain: at most 1; 0 for an output with constant labels.

    Args:
      class_aggregation: aggregation of the outputs: "uniform_average", "variance_weighted_average", or None for one
        score per output.
      num_regressors: number of independent variables, for the adjusted score. 0 gives the standard score, which is
        also returned if there are too few samples to adjust. Rows of weight 0 are not samples. (Keras counts them.)
      name: see `Metric`.
      dtype: see `Metric`.

    Raises:
      ValueError: if an argument is invalid. In updates, if the data is not `(n, outputs)`.

    Source: Glantz and Slinker, "Primer of Applied Regression and Analysis of Variance", 1990.

    >>> round(float(R2Score()([[1.0], [4.0], [3.0]], [[2.0], [4.0], [4.0]])), 4)
    0.5714
    """

    direction = "max"

    def __init__(
        self,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str | None = "r2_score",
        dtype: DTypeLike | None = None,
    ):
        if class_aggregation not in AGGREGATIONS:
            raise ValueError(f"Invalid value for argument `class_aggregation`. Expected one of {AGGREGATIONS}. "
                             f"Received: class_aggregation={class_aggregation!r}.")
        if num_regressors < 0:
            raise ValueError(f"Invalid value for argument `num_regressors`. Expected a value >= 0. "
                             f"Received: num_regressors={num_regressors}.")
        super().__init__(dtype, name)
        self.class_aggregation = class_aggregation
        self.num_regressors = num_regressors
        self.num_samples = self.add_variable(name="num_samples")

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_table("R2Score", y_true, y_pred)

    def build(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if len(self._variables) == 1:
            self.validate(y_true, y_pred)
            outputs = (y_pred.shape[1],)
            self.squared_sum = self.add_variable(outputs, name="squared_sum")
            self.sum = self.add_variable(outputs, name="sum")
            self.total_mse = self.add_variable(outputs, name="residual")
            self.count = self.add_variable(outputs, name="count")

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Accumulates the sums of a batch.

        Args:
          y_true: labels, `(n, outputs)`.
          y_pred: predictions, `(n, outputs)`.
          sample_weight: a scalar, or one weight per row or per value.

        Raises:
          ValueError: if the shapes are different from the above.
        """
        y_true, y_pred = as_table_pair("R2Score", y_true, y_pred)
        self.build(y_true, y_pred)
        weights = full_weights(y_true, sample_weight)
        self.sum.assign_add(jnp.sum(y_true * weights, axis=0))
        self.squared_sum.assign_add(jnp.sum(jnp.square(y_true) * weights, axis=0))
        self.total_mse.assign_add(jnp.sum(jnp.square(y_true - y_pred) * weights, axis=0))
        self.count.assign_add(jnp.sum(weights, axis=0))
        # As in Keras, each output of a row is a sample. Values of weight 0 are not samples.
        self.num_samples.assign_add(jnp.count_nonzero(weights))

    def result(self) -> jax.Array:
        """Returns the score: a scalar, or `(outputs,)` if `class_aggregation` is None."""
        total = self.squared_sum.value - self.sum.value * divide_no_nan(self.sum.value, self.count.value)
        score = jnp.where(total == 0, 0.0, 1.0 - divide_no_nan(self.total_mse.value, total))
        if self.class_aggregation == "uniform_average":
            score = jnp.mean(score)
        elif self.class_aggregation == "variance_weighted_average":
            score = divide_no_nan(jnp.sum(total * score), jnp.sum(total))
        if self.num_regressors == 0:
            return score
        samples = self.num_samples.value
        freedom = samples - self.num_regressors - 1.0
        adjusted = 1.0 - divide_no_nan((1.0 - score) * (samples - 1.0), freedom)
        return jnp.where(freedom > 0, adjusted, score)
