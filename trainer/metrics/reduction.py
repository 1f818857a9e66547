"""Sums and means of values, and metrics that average a function or a loss.

Owns the weighted accumulation of values. A mean divides by the sum of the weights, so that accumulators of parts of
the data can be added.
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
from trainer.core.errors import wrong_type
from trainer.core.replica_context import get_replica_context
from trainer.core.types import ArrayLike
from trainer.losses import Loss
from trainer.losses.base import BuiltinLoss, values_per_row
from trainer.losses.registry import is_builtin
from trainer.losses.shapes import as_arguments, as_arrays, as_float, in_dtype
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
        """Adds values to the sum.

        Args:
          values: numbers of any shape, rows first.
          sample_weight: a scalar, or one weight per row or per value.

        Raises:
          ValueError: if the shapes do not match.
        """
        values = as_float(values)
        self.total.assign_add(jnp.sum(values * full_weights(values, sample_weight)))

    def result(self) -> jax.Array:
        """Returns the sum, a scalar."""
        return self.total.value.astype(self.dtype)


class WeightedMean(Metric):
    """The base class of means: accumulates the weighted sum of values and the sum of their weights.

    The values of a row are averaged first, so that each row counts once, regardless of its number of values. A scalar
    weight counts once per row.
    """

    def __init__(self, name: str | None = None, dtype: DTypeLike | None = None):
        super().__init__(dtype, name)
        self.total = self.add_variable(name="total")
        self.count = self.add_variable(name="count")

    def add_values(self, values: ArrayLike, sample_weight: ArrayLike | None) -> None:
        """Adds values to the mean.

        Args:
          values: numbers of any shape, rows first; a scalar is a single row.
          sample_weight: a scalar, or one weight per row or per value, or None.

        Raises:
          ValueError: if the shapes do not match.
        """
        values = as_float(values)
        weights = full_weights(values, sample_weight)
        row_size = math.prod(values.shape[1:])
        self.total.assign_add(jnp.sum(values * weights) / row_size)
        self.count.assign_add(jnp.sum(weights) / row_size)

    def result(self) -> jax.Array:
        """Returns the mean, a scalar; 0 if the sum of the weights is 0."""
        return divide_no_nan(self.total.value, self.count.value).astype(self.dtype)


class Mean(WeightedMean):
    """The weighted mean of values: their weighted sum divided by the sum of the weights.

    >>> float(Mean()([1, 3, 5, 7], sample_weight=[1, 1, 0, 0]))
    2.0
    """

    def __init__(self, name: str | None = "mean", dtype: DTypeLike | None = None):
        super().__init__(name, dtype)

    def update_state(self, values: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds values to the mean; see `WeightedMean.add_values`."""
        self.add_values(values, sample_weight)


class MeanMetricWrapper(WeightedMean):
    """The mean of a function of labels and predictions.

    As in a loss, the function receives integers as int32 or wider, and arguments of matched ranks, so that labels of
    shape `(n,)` and predictions of shape `(n, 1)` do not broadcast to `(n, n)`.

    Args:
      fn: a function of `(y_true, y_pred, **kwargs)` that returns one or more values per row, `(n, ...)`. A scalar for a
        batch counts once for each of its rows.
      name: see `Metric`.
      dtype: see `Metric`.
      **kwargs: additional arguments of `fn`.

    >>> def absolute_error(y_true, y_pred):
    ...     return jnp.abs(y_true - y_pred)
    >>> float(MeanMetricWrapper(absolute_error)([1.0, 2.0], [1.0, 4.0]))
    1.0
    """

    #: Whether to match the ranks of labels and predictions and to cast integers to signed types for the function.
    matches_arguments: ClassVar[bool] = True

    def __init__(self, fn: Callable[..., Any], name: str | None = None, dtype: DTypeLike | None = None, **kwargs: Any):
        if not callable(fn):
            raise wrong_type("fn", fn, "a function of labels and predictions")
        super().__init__(name, dtype)
        self._function = fn
        self.fn_kwargs = kwargs

    @property
    def fn(self) -> Callable[..., Any]:
        """The function to call with the given labels and predictions; it matches them first, if needed."""
        return functools.partial(_call_matched, self._function) if self.matches_arguments else self._function

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds the function's values to the mean.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: a scalar, or one weight per row or per value of the function.

        Raises:
          ValueError: if the shapes do not match, or the function's values do not have the rows first.
        """
        labels, predictions = as_arrays(y_true), as_arrays(y_pred)
        self.validate(labels, predictions)
        rows = jax.tree.leaves(predictions)[0].shape[:1]
        if get_replica_context().is_padded:  # a value for each row, so that padding can be excluded
            values = values_per_row(self.fn, labels, predictions, **self.fn_kwargs)
        else:
            values = in_dtype(f"The values of the metric {self.name!r}", self.fn(
                labels, predictions, **self.fn_kwargs), None)
            if values.ndim == 0 and sample_weight is None:  # a value of the batch, which counts for each row
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
      loss: the loss, whose reduction is ignored.
      name: the loss's name if None.
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
        """Adds the loss of each sample to the mean.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: a scalar, or one weight per row or per value of the loss.

        Raises:
          ValueError: if the shapes do not match.
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
