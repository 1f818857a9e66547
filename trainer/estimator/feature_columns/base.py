"""Base classes of feature columns.

On the host, `HostFeature`s convert raw features to arrays of numbers. On the device, columns convert these arrays to
float32 rows or to row ids of a table. Strings never reach a device.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import numpy as np

from trainer.core.errors import near_hint, wrong_type
from trainer.estimator.feature_columns.values.raw_features import RawFeatures

MISSING_ID = -1

Features: TypeAlias = Mapping[str, jax.Array]
"""Arrays from `HostTransform`, by the keys of `HostFeature`s."""

Initializer: TypeAlias = Callable[..., jax.Array]
"""A function of a random key, a shape and a dtype, as in `flax.linen.initializers`."""


class IdsAndWeights(NamedTuple):
    """Row ids of a table, with weights.

    Attributes:
      ids: int32 of shape `(rows, values)`, or `(rows, time, values)` for sequences; negative for missing values.
      weights: float32 of the same shape; None for weights of 1.
    """

    ids: jax.Array
    weights: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A weight matrix for lookups by id.

    Attributes:
      name: name of the parameter.
      rows: number of rows.
      width: number of columns.
      initializer: initializer of the matrix; None for a normal distribution with standard deviation `1 / sqrt(width)`,
        truncated at two standard deviations.
      trainable: whether the table is a parameter.
    """

    name: str
    rows: int
    width: int
    initializer: Initializer | None = None
    trainable: bool = True


Tables: TypeAlias = Mapping[Table, jax.Array]


class HostFeature(abc.ABC):
    """An array that the host computes, under a key. Equal objects are computed once."""

    @property
    @abc.abstractmethod
    def output_key(self) -> str:
        """Key of the array among the device's features."""

    @abc.abstractmethod
    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns the array: float32 or int32, rows first."""


class FeatureColumn(abc.ABC):
    """A rule from features to a part of the model's input. It holds no arrays and compares by its fields."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the column: the sort key of columns and the name of its parameters."""

    @property
    @abc.abstractmethod
    def host_features(self) -> tuple[HostFeature, ...]:
        """Arrays of the column that the host computes."""

    @property
    def lengths_key(self) -> str | None:
        """Key of the sequence lengths among the device's features; None for a column without sequences."""
        return None


class DenseColumn(FeatureColumn):
    """A column of numbers, for `DenseFeatures`, or of sequences of numbers, for `SequenceFeatures`."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Number of values per row, or per time step of a sequence."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables for lookups by the column."""
        return ()

    @abc.abstractmethod
    def dense(self, features: Features, tables: Tables) -> jax.Array:
        """Returns float32 of shape `(rows, width)`, or `(rows, time, width)` for sequences."""


class CategoricalColumn(FeatureColumn):
    """A column of ids, for `LinearFeatures`, embedding columns and indicator columns."""

    is_crossable: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """Number of ids; ids range from 0 to `num_buckets - 1`."""

    @abc.abstractmethod
    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        """Returns the ids on the device."""

    @abc.abstractmethod
    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        """Returns the ids on the host, int64 of shape `(rows, values)`; negative for values without an id."""

    @abc.abstractmethod
    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """Returns a mask of the values that are not missing, bool of the ids' shape; unknown values are present."""


@dataclasses.dataclass(frozen=True)
class DenseOfCategorical(DenseColumn):
    """A dense column computed from a categorical column."""

    categorical_column: CategoricalColumn

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return self.categorical_column.host_features

    @property
    def lengths_key(self) -> str | None:
        return self.categorical_column.lengths_key


class LookedUpColumn(CategoricalColumn, HostFeature):
    """A categorical column with ids that the host computes."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Short name of the lookup method, which is part of `output_key`."""

    @property
    def output_key(self) -> str:
        """Key with the kind and the number of ids, because several columns may read the same feature."""
        return f"{self.name}/{self.kind}_{self.num_buckets}"

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return (self,)

    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns the ids as int32 of shape `(rows, values)`.

        Raises:
          ValueError: if the values of a row have more than one axis.
        """
        ids = self.host_ids(raw)
        if ids.ndim != 2:
            raise ValueError(f"Column {self.name!r} takes values of shape `(rows, values)`. Received: {ids.ndim} axes.")
        return np.maximum(ids, MISSING_ID).astype(np.int32)

    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        return raw.once(self, lambda: self.look_up(raw))

    @abc.abstractmethod
    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """Computes the ids of `host_ids`, without caching."""

    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        return IdsAndWeights(read_feature(features, self.output_key, self.name))


def read_feature(features: Features, key: str, column: str) -> jax.Array:
    """Returns an array from the device's features.

    Raises:
      ValueError: if the array is missing.
    """
    if key not in features:
        raise ValueError(f"Column {column!r} reads {key!r} on the device, and the features have none. "
                         f"{near_hint(key, features)} Map the data by `HostTransform(columns)` before the model gets "
                         "them.")
    return features[key]


def as_columns(columns: FeatureColumn | Iterable[FeatureColumn]) -> tuple[FeatureColumn, ...]:
    """Returns columns sorted by name.

    Raises:
      TypeError: if an element of `columns` is not a feature column.
      ValueError: if there are no columns, or two columns have the same name.
    """
    found = listed_columns(columns)
    names: dict[str, FeatureColumn] = {}
    for column in found:
        if column.name in names:
            raise ValueError(f"Two columns have the name {column.name!r}: {names[column.name]} and {column}. Remove "
                             "one, or give the feature under another key too.")
        names[column.name] = column
    return tuple(sorted(found, key=lambda column: column.name))


def listed_columns(columns: FeatureColumn | Iterable[FeatureColumn]) -> tuple[FeatureColumn, ...]:
    """Returns the columns in the given order, with repeated names allowed.

    Raises:
      TypeError: if an element of `columns` is not a feature column.
      ValueError: if there are no columns.
    """
    found: Any = [columns] if isinstance(columns, FeatureColumn) else columns
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
        raise wrong_type("columns", columns, "a sequence of feature columns")
    found = tuple(found)
    for column in found:
        if not isinstance(column, FeatureColumn):
            raise wrong_type("columns", column, "a sequence of feature columns")
    if not found:
        raise ValueError("`columns` must have at least one feature column. Received: none.")
    return found


def as_categorical(argument: str, column: object) -> CategoricalColumn:
    """Returns a categorical column.

    Raises:
      TypeError: if `column` is not a categorical column.
    """
    if not isinstance(column, CategoricalColumn):
        raise wrong_type(argument, column, "a categorical column, such as `categorical_column_with_*` make")
    return column
