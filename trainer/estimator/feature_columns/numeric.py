"""Columns of numbers: numeric and bucketized."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe, wrong_type
from trainer.estimator.feature_columns.base import (
    CategoricalColumn,
    DenseColumn,
    Features,
    HostFeature,
    IdsAndWeights,
    Tables,
    read_feature,
)
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


@dataclasses.dataclass(frozen=True)
class Numbers(HostFeature):
    """A numeric feature as float32 of shape `(rows, *shape)`."""

    key: str
    shape: tuple[int, ...]
    default_value: float | tuple[float, ...] | None = None

    @property
    def output_key(self) -> str:
        """Key of the feature."""
        return self.key

    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns the numbers, with NaN replaced by the default value.

        Raises:
          ValueError: if the feature is missing, is not numeric, or has another shape.
        """
        numbers = raw.numbers(self.key)
        if math.prod(numbers.shape[1:]) != math.prod(self.shape):
            raise ValueError(f"Feature {self.key!r} must have rows of shape {self.shape}. Received: "
                             f"{describe(numbers)}. Give `numeric_column` that shape.")
        numbers = numbers.reshape(len(numbers), *self.shape)
        if self.default_value is None:
            return numbers
        default = np.broadcast_to(np.asarray(self.default_value, np.float32).reshape(-1), math.prod(self.shape))
        return np.where(np.isnan(numbers), default.reshape(self.shape), numbers)


@dataclasses.dataclass(frozen=True)
class NumericColumn(DenseColumn):
    """Column of `numeric_column`."""

    key: str
    shape: tuple[int, ...] = (1,)
    default_value: float | tuple[float, ...] | None = None
    dtype: str = "float32"
    normalizer_fn: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        return self.key

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return (Numbers(self.key, self.shape, self.default_value),)

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def normalized(self, features: Features) -> jax.Array:
        """Returns float32 of shape `(rows, *shape)`."""
        return normalize(self.normalizer_fn, read_feature(features, self.key, self.name))

    def dense(self, features: Features, tables: Tables) -> jax.Array:
        numbers = self.normalized(features)
        return numbers.reshape(numbers.shape[0], self.width)


@dataclasses.dataclass(frozen=True)
class BucketizedColumn(DenseColumn, CategoricalColumn):
    """Column of `bucketized_column`."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return self.source_column.host_features

    @property
    def buckets_of_one(self) -> int:
        """Number of buckets per number."""
        return len(self.boundaries) + 1

    @property
    def num_buckets(self) -> int:
        """Number of ids; each number of a row has separate buckets."""
        return self.source_column.width * self.buckets_of_one

    @property
    def width(self) -> int:
        return self.num_buckets

    def dense(self, features: Features, tables: Tables) -> jax.Array:
        one_hot = jax.nn.one_hot(self._buckets(features), self.buckets_of_one, dtype=jnp.float32)
        return one_hot.reshape(one_hot.shape[0], self.width)

    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        return IdsAndWeights(self._buckets(features) + self._first_ids().astype(np.int32))

    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        return raw.once(self, lambda: self._host_buckets(raw) + self._first_ids())

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """Returns True for all numbers, because each number falls into a bucket."""
        return np.ones_like(self.host_ids(raw), bool)

    def _buckets(self, features: Features) -> jax.Array:
        numbers = self.source_column.normalized(features).reshape(-1, self.source_column.width)
        # The default method is a loop, which launches a kernel per iteration on GPUs.
        buckets = jnp.searchsorted(self._edges(), numbers, side="right", method="scan_unrolled")
        return buckets.astype(jnp.int32)

    def _host_buckets(self, raw: RawFeatures) -> np.ndarray:
        (feature,) = self.host_features
        numbers = np.asarray(normalize(self.source_column.normalizer_fn, feature.read(raw)), np.float32)
        numbers = numbers.reshape(-1, self.source_column.width)
        return np.searchsorted(self._edges(), numbers, side="right").astype(np.int64)

    def _edges(self) -> np.ndarray:
        return np.asarray(self.boundaries, np.float32)

    def _first_ids(self) -> np.ndarray:
        return self.buckets_of_one * np.arange(self.source_column.width)


def normalize(normalizer_fn: Callable[[Any], Any] | None, numbers: Any) -> Any:
    """Returns float32 numbers, after `normalizer_fn` if given."""
    if normalizer_fn is not None:
        numbers = normalizer_fn(numbers)
    return numbers.astype(np.float32)


@explains_arguments
def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: float | Sequence[float] | None = None,
    dtype: DTypeLike = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Returns a column of a numeric feature.

    Args:
      key: key of the feature; also the name of the column.
      shape: shape of a row.
      default_value: replacement for NaN: a number, or numbers of shape `shape`. None keeps NaN.
      dtype: dtype of the numbers; the model receives float32.
      normalizer_fn: function of JAX arrays of shape `(rows, *shape)`, such as `lambda x: (x - 3) / 4.2`. It runs on the
        device, and also on the host for a crossed bucketized column.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the shape or the dtype is invalid, or `default_value` does not fit the shape.

    Example:
      >>> numeric_column("price", shape=2).width
      2

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/numeric_column.
    """
    arguments.require_functions(normalizer_fn=normalizer_fn)
    axes = checks.as_shape(shape)
    return NumericColumn(checks.as_key("key", key), axes, _as_default(default_value, axes),
                         checks.as_numeric_dtype("dtype", dtype), normalizer_fn)


@explains_arguments
def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Returns a column of bucket indices, both dense (one-hot) and categorical.

    Args:
      source_column: column from `numeric_column`, with one axis.
      boundaries: ascending numbers. A number on a boundary falls into the bucket on its right: `[0, 10]` gives the
        buckets `x < 0`, `0 <= x < 10` and `10 <= x`.

    Raises:
      TypeError: if `source_column` is not a numeric column, or `boundaries` is not a list of numbers.
      ValueError: if `source_column` has several axes, or `boundaries` is empty or not ascending.

    Example:
      >>> bucketized_column(numeric_column("age"), [18, 65]).num_buckets
      3

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/bucketized_column.
    """
    if not isinstance(source_column, NumericColumn):
        raise wrong_type("source_column", source_column, "what `numeric_column` makes")
    if len(source_column.shape) > 1:
        raise ValueError(f"`source_column` must have one axis. Received: {source_column.name!r} of shape "
                         f"{source_column.shape}.")
    if not isinstance(boundaries, (list, tuple)):
        raise wrong_type("boundaries", boundaries, "a list of ascending numbers")
    edges = tuple(arguments.as_number("boundaries", edge) for edge in boundaries)
    if not edges or not all(left < right for left, right in itertools.pairwise(edges)):
        raise ValueError(f"`boundaries` must be a list of ascending numbers. Received: {len(edges)} that are not.")
    return BucketizedColumn(source_column, edges)


def _as_default(value: object, shape: tuple[int, ...]) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iuf":
        raise wrong_type("default_value", value, "a number, or numbers of the column's shape")
    if numbers.ndim == 0:
        return float(numbers)
    if numbers.shape != shape:
        raise ValueError(f"`default_value` must be a number, or numbers of the column's shape {shape}. Received: "
                         f"{describe(numbers)}.")
    return tuple(numbers.ravel().astype(float).tolist())
