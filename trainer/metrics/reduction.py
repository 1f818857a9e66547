"""Sums and means of values, and metrics that are the mean of a function or of a loss.

Owns how values of many samples, with weights, are accumulated. A mean divides by the sum of the weights, so that
accumulators of parts of the data add up to those of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer import losses
from trainer.core import configs
from trainer.core.replica_context import get_replica_context
from trainer.core.types import ArrayLike
from trainer.losses import Loss
from trainer.losses.base import BuiltinLoss, values_per_row
from trainer.losses.registry import is_builtin
from trainer.losses.shapes import as_arguments, as_arrays, as_float
from trainer.metrics.arrays import divide_no_nan, full_weights
from trainer.metrics.base import Metric


class Sum(Metric):
    """The weighted sum of values.

    >>> float(Sum()([1, 3, 5, 7], sample_weight=[1, 1, 0, 0]))
    4.0
    """

    def __init__(self, name: str | None = "sum", dtype: DTypeLike | None = None):
        super().__init__(dtype, name)
        self.total = self.add_variable(name="total")

    def update_state(self, values: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds values.

        Args:
          values: numbers of any shape, rows first.
          sample_weight: a scalar, or one weight per row or per value.

        Raises:
          ValueError: where the shapes cannot match.
        """
        values = as_float(values)
        self.total.assign_add(jnp.sum(values * full_weights(values, sample_weight)))

    def result(self) -> jax.Array:
        """Returns the sum, a scalar."""
        return self.total.value.astype(self.dtype)


class WeightedMean(Metric):
    """What every mean shares: the weighted sum of values, the sum of their weights, and the quotient.

    Values of a row are averaged first, so that a row counts once, however many values it has. A scalar weight counts
    once for each row.
    """

    def __init__(self, name: str | None = None, dtype: DTypeLike | None = None):
        super().__init__(dtype, name)
        self.total = self.add_variable(name="total")
        self.count = self.add_variable(name="count")

    def add_values(self, values: ArrayLike, sample_weight: ArrayLike | None) -> None:
        """Adds values.

        Args:
          values: numbers of any shape, rows first; a scalar is one row.
          sample_weight: a scalar, or one weight per row or per value, or None.

        Raises:
          ValueError: where the shapes cannot match.
        """
        values = as_float(values)
        weights = full_weights(values, sample_weight)
        row_size = math.prod(values.shape[1:])
        self.total.assign_add(jnp.sum(values * weights) / row_size)
        self.count.assign_add(jnp.sum(weights) / row_size)

    def result(self) -> jax.Array:
        """Returns the mean, a scalar; 0 where the weights add up to 0."""
        return divide_no_nan(self.total.value, self.count.value).astype(self.dtype)


class Mean(WeightedMean):
    """The weighted mean of values: their weighted sum divided by the sum of the weights.

    >>> float(Mean()([1, 3, 5, 7], sample_weight=[1, 1, 0, 0]))
    2.0
    """

    def __init__(self, name: str | None = "mean", dtype: DTypeLike | None = None):
        super().__init__(name, dtype)

    def update_state(self, values: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds values; see `WeightedMean.add_values`."""
        self.add_values(values, sample_weight)


class MeanMetricWrapper(WeightedMean):
    """The mean of a function of labels and predictions.

    As in a loss, these reach the function with their ranks matched, so that labels of shape `(n,)` and predictions of
    `(n, 1)` do not broadcast to `(n, n)`, and integers as int32 or wider.

    Args:
      fn: a function of `(y_true, y_pred, **kwargs)` that returns one value per row, or several: `(n, ...)`. One that
        returns a scalar for a batch counts for each of its rows.
      name: see `Metric`.
      dtype: see `Metric`.
      **kwargs: further arguments of `fn`.

    >>> def absolute_error(y_true, y_pred):
    ...     return jnp.abs(y_true - y_pred)
    >>> float(MeanMetricWrapper(absolute_error)([1.0, 2.0], [1.0, 4.0]))
    1.0
    """

    #: Whether labels and predictions are brought to matching ranks and signed integers before the function gets them.
    matches_arguments: ClassVar[bool] = True

    def __init__(self, fn: Callable[..., Any], name: str | None = None, dtype: DTypeLike | None = None, **kwargs: Any):
        super().__init__(name, dtype)
        self._function = fn
        self.fn_kwargs = kwargs

    @property
    def fn(self) -> Callable[..., Any]:
        """The function as it is called: with labels and predictions as they come."""
        return functools.partial(_call_matched, self._function) if self.matches_arguments else self._function

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds the function's values.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: a scalar, or one weight per row or per value of the function.

        Raises:
          ValueError: where shapes cannot match, or the function's values do not have the rows first.
        """
        labels, predictions = as_arrays(y_true), as_arrays(y_pred)
        self.validate(labels, predictions)
        rows = jax.tree.leaves(predictions)[0].shape[:1]
        if get_replica_context().is_padded:  # a number for each row, so that padding can be left out
            values = values_per_row(self.fn, labels, predictions, **self.fn_kwargs)
        else:
            values = jnp.asarray(self.fn(labels, predictions, **self.fn_kwargs))
            if values.ndim == 0 and sample_weight is None:  # of the batch, which counts as many rows
                values = jnp.broadcast_to(values, rows)
        if values.shape[:1] != rows:
            raise ValueError(f"The function of the metric {self.name!r} must return values of shape (rows, ...) with "
                             f"rows={rows}, or one scalar for a batch without weights. Received: values of shape "
                             f"{values.shape}. Reduce over the axes of features only; the metric takes the mean over "
                             "rows itself.")
        self.add_values(values, sample_weight)

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), **self.fn_kwargs}
        if "fn" not in config:
            return config
        is_known = is_builtin(self._function) or configs.is_registered(self._function)
        return {**config, "fn": losses.serialize(self._function) if is_known else self._function}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        if configs.is_config(config.get("fn")):
            config = {**config, "fn": losses.deserialize(config["fn"])}
        return cls(**config)


def _call_matched(function: Callable[..., Any], y_true: ArrayLike, y_pred: ArrayLike, **arguments: Any) -> Any:
    return function(*as_arguments(y_true, y_pred), **arguments)


class LossMetric(WeightedMean):
    """The mean of a loss, over the samples that the loss's mask keeps.

    Args:
      loss: the loss, whose reduction plays no part.
      name: the loss's name where None.
      dtype: see `Metric`.

    >>> from trainer import losses
    >>> float(LossMetric(losses.Huber(delta=2.0))([[0, 0]], [[1, 4]]))
    3.25
    """

    direction = "min"

    def __init__(self, loss: Loss, name: str | None = None, dtype: DTypeLike | None = None):
        super().__init__(name or loss.name, dtype)
        self.loss = loss

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        self.loss.validate(y_true, y_pred)

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds the loss of each sample.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: a scalar, or one weight per row or per value of the loss.

        Raises:
          ValueError: where shapes cannot match.
        """
        labels, predictions = as_arrays(y_true), as_arrays(y_pred)
        values = self.loss.values(labels, predictions)
        mask = self.loss.mask(labels, predictions)
        if mask is not None:
            sample_weight = full_weights(values, sample_weight) * mask
        self.add_values(values, sample_weight)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        if isinstance(config.get("loss"), BuiltinLoss) or configs.is_registered(type(config.get("loss"))):
            config["loss"] = losses.serialize(self.loss)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        if configs.is_config(config.get("loss")):
            config = {**config, "loss": losses.deserialize(config["loss"])}
        return cls(**config)
