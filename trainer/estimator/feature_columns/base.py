"""What a feature column is: what it needs of the host, and what it makes of that on the device.

Owns the split. On the host, `HostPart`s turn features as users give them into arrays of numbers. On the device, columns
turn these into rows of float32, or into ids of rows of a table. Strings never reach a device.
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
"""What `HostTransform` returned: arrays of numbers by the keys of host parts."""

Initializer: TypeAlias = Callable[..., jax.Array]
"""A function of a random key, a shape and a dtype, as those of `flax.linen.initializers`."""


class IdsAndWeights(NamedTuple):
    """Which rows of a table are meant, and how much each counts.

    Attributes:
      ids: int32 of shape `(rows, values)`, or `(rows, time, values)` of sequences; negative where there is none.
      weights: float32 of the same shape; None where each counts 1.
    """

    ids: jax.Array
    weights: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A matrix of weights that a column looks rows up in.

    Attributes:
      name: the name that its parameter has.
      rows: how many rows it has.
      width: how many columns.
      initializer: what draws it; None for a normal distribution of standard deviation `1 / sqrt(width)`, cut at two.
      trainable: whether it is a parameter.
    """

    name: str
    rows: int
    width: int
    initializer: Initializer | None = None
    trainable: bool = True


Tables: TypeAlias = Mapping[Table, jax.Array]


class HostPart(abc.ABC):
    """One array that the host makes, under one key. Equal parts are made once; they compare by what they compute."""

    @property
    @abc.abstractmethod
    def part_key(self) -> str:
        """The key of the array among what the device gets."""

    @abc.abstractmethod
    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns the array: float32 or int32, rows first."""


class FeatureColumn(abc.ABC):
    """A description of how features become the input of a model. It holds no arrays, and compares by its fields."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name, by which columns are sorted and parameters known."""

    @property
    @abc.abstractmethod
    def host_parts(self) -> tuple[HostPart, ...]:
        """What the host makes for it."""

    @property
    def lengths_key(self) -> str | None:
        """The key of the lengths of sequences among what the device gets; None for a column that is no sequence."""
        return None


class DenseColumn(FeatureColumn):
    """A column of numbers, which `DenseFeatures` takes; or of sequences of them, which `SequenceFeatures` takes."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """How many numbers a row has, or a time step of one."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that it looks rows up in."""
        return ()

    @abc.abstractmethod
    def dense(self, features: Features, tables: Tables) -> jax.Array:
        """Returns float32 of shape `(rows, width)`, or `(rows, time, width)` of sequences."""


class CategoricalColumn(FeatureColumn):
    """A column of ids, which `LinearFeatures` takes, and others once it is embedded or made an indicator."""

    is_crossable: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """How many ids there are: from 0 to one less."""

    @abc.abstractmethod
    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        """Returns the ids on the device."""

    @abc.abstractmethod
    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        """Returns the ids on the host, int64 of shape `(rows, values)`; negative where a value has none."""

    @abc.abstractmethod
    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """Returns where there is a value at all, with an id or not; booleans of the same shape."""


@dataclasses.dataclass(frozen=True)
class DenseOfCategorical(DenseColumn):
    """A column of numbers that are made of a categorical column's ids."""

    categorical_column: CategoricalColumn

    @property
    def host_parts(self) -> tuple[HostPart, ...]:
        """See `FeatureColumn`."""
        return self.categorical_column.host_parts

    @property
    def lengths_key(self) -> str | None:
        """See `FeatureColumn`."""
        return self.categorical_column.lengths_key


class LookedUpColumn(CategoricalColumn, HostPart):
    """A categorical column whose ids the host looks up."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """A word for how ids are looked up."""

    @property
    def part_key(self) -> str:
        """See `HostPart`: two kinds of ids may come from one feature."""
        return f"{self.name}/{self.kind}_{self.num_buckets}"

    @property
    def host_parts(self) -> tuple[HostPart, ...]:
        """See `FeatureColumn`."""
        return (self,)

    def read(self, raw: RawFeatures) -> np.ndarray:
        """See `HostPart`.

        Raises:
          ValueError: if the values of a row have more than one axis.
        """
        ids = self.host_ids(raw)
        if ids.ndim != 2:
            raise ValueError(f"Column {self.name!r} takes values of shape `(rows, values)`. Received: {ids.ndim} axes.")
        return np.maximum(ids, MISSING_ID).astype(np.int32)

    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        """See `CategoricalColumn`."""
        return raw.once(self, lambda: self.look_up(raw))

    @abc.abstractmethod
    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """Returns what `host_ids` returns, and keeps nothing."""

    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        """See `CategoricalColumn`."""
        return IdsAndWeights(read_feature(features, self.part_key, self.name))


def read_feature(features: Features, key: str, column: str) -> jax.Array:
    """Returns one of the arrays that the device got.

    Raises:
      ValueError: if it is not there.
    """
    if key not in features:
        raise ValueError(f"Column {column!r} reads {key!r} on the device, and the features have none. "
                         f"{near_hint(key, features)} Map the data by `HostTransform(columns)` before the model gets "
                         "them.")
    return features[key]


def as_columns(columns: FeatureColumn | Iterable[FeatureColumn]) -> tuple[FeatureColumn, ...]:
    """Returns columns sorted by name.

    Raises:
      TypeError: if one of them is no feature column.
      ValueError: if there are none, or two have one name.
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
    """Returns the columns in their order, whatever names they have.

    Raises:
      TypeError: if one of them is no feature column.
      ValueError: if there are none.
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


def as_categorical(argument: str, column: Any) -> CategoricalColumn:
    """Returns a categorical column.

    Raises:
      TypeError: if it is none.
    """
    if not isinstance(column, CategoricalColumn):
        raise wrong_type(argument, column, "a categorical column, such as `categorical_column_with_*` make")
    return column
