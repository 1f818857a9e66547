"""Columns of sequences: numbers or ids for each time step."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe
from trainer.estimator.feature_columns.base import (
    DenseColumn,
    Features,
    HostFeature,
    LookedUpColumn,
    Tables,
    read_feature,
)
from trainer.estimator.feature_columns.hashed import categorical_column_with_hash_bucket
from trainer.estimator.feature_columns.identity import categorical_column_with_identity
from trainer.estimator.feature_columns.numeric import normalize
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures
from trainer.estimator.feature_columns.vocabulary import (
    Word,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)


class Lengths(HostFeature):
    """Number of time steps of each row, up to the last value; int32 of shape `(rows,)`."""

    def read(self, raw: RawFeatures) -> np.ndarray:
        is_present = self.steps_present(raw)
        last = is_present.shape[1] - np.argmax(is_present[:, ::-1], axis=1)
        return np.where(is_present.any(axis=1), last, 0).astype(np.int32)

    @abc.abstractmethod
    def steps_present(self, raw: RawFeatures) -> np.ndarray:
        """Returns a mask of the time steps that have a value, bool of shape `(rows, time)`."""


@dataclasses.dataclass(frozen=True)
class IdLengths(Lengths):
    """Lengths of sequences of ids."""

    column: LookedUpColumn

    @property
    def output_key(self) -> str:
        return f"{self.column.output_key}/lengths"

    def steps_present(self, raw: RawFeatures) -> np.ndarray:
        """Returns a mask of the time steps that have a value; unknown words count as values."""
        is_present = self.column.is_present(raw)
        return np.any(is_present.reshape(*is_present.shape[:2], -1), axis=2)


@dataclasses.dataclass(frozen=True)
class SequenceCategoricalColumn(LookedUpColumn):
    """Column of `sequence_categorical_column_with_identity` and similar functions."""

    is_crossable: ClassVar[bool] = False

    categorical_column: LookedUpColumn

    @property
    def name(self) -> str:
        return self.categorical_column.name

    @property
    def kind(self) -> str:
        return f"sequence_{self.categorical_column.kind}"

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return (self, IdLengths(self))

    @property
    def lengths_key(self) -> str | None:
        return IdLengths(self).output_key

    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns int32 of shape `(rows, time, values)`."""
        ids = self.host_ids(raw)
        return np.maximum(ids, -1).astype(np.int32).reshape(*ids.shape[:2], -1)

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        return self.categorical_column.host_ids(raw)

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        return self.categorical_column.is_present(raw)


@dataclasses.dataclass(frozen=True)
class SequenceNumbers(HostFeature):
    """Sequences of numbers, float32 of shape `(rows, time, *shape)`, with 0 for missing numbers."""

    key: str
    shape: tuple[int, ...]

    @property
    def output_key(self) -> str:
        return f"{self.key}/sequence"

    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns the numbers, with NaN replaced by 0.

        Raises:
          ValueError: if the feature is missing, is not numeric, or does not divide into time steps of shape `shape`.
        """
        return np.nan_to_num(self.steps(raw), nan=0.0, posinf=np.inf, neginf=-np.inf)

    def steps(self, raw: RawFeatures) -> np.ndarray:
        """Returns the numbers in time steps, with NaN for missing numbers."""
        numbers = raw.numbers(self.key)
        size = math.prod(self.shape)
        of_a_step = math.prod(numbers.shape[2:]) if numbers.ndim > 2 else size
        if of_a_step != size or numbers.shape[1] % (size if numbers.ndim == 2 else 1):
            raise ValueError(f"Feature {self.key!r} must have time steps of shape {self.shape}. Received: "
                             f"{describe(numbers)}. Give `(rows, time, *shape)` or `(rows, time * size)`.")
        return numbers.reshape(len(numbers), -1, *self.shape)


@dataclasses.dataclass(frozen=True)
class NumberLengths(Lengths):
    """Lengths of sequences of numbers."""

    numbers: SequenceNumbers

    @property
    def output_key(self) -> str:
        return f"{self.numbers.output_key}/lengths"

    def steps_present(self, raw: RawFeatures) -> np.ndarray:
        steps = self.numbers.steps(raw)
        is_number = ~np.isnan(steps).reshape(*steps.shape[:2], -1)
        return np.any(is_number, axis=2)


@dataclasses.dataclass(frozen=True)
class SequenceNumericColumn(DenseColumn):
    """Column of `sequence_numeric_column`."""

    key: str
    shape: tuple[int, ...] = (1,)
    default_value: float = 0.0
    dtype: str = "float32"
    normalizer_fn: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        return self.key

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return (self._numbers, NumberLengths(self._numbers))

    @property
    def lengths_key(self) -> str | None:
        return NumberLengths(self._numbers).output_key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def dense(self, features: Features, tables: Tables) -> jax.Array:
        """Returns the normalized steps; steps after the end are `default_value`, without normalization."""
        numbers = read_feature(features, self._numbers.output_key, self.name)
        lengths = read_feature(features, NumberLengths(self._numbers).output_key, self.name)
        is_step = jnp.arange(numbers.shape[1]) < lengths[:, None]
        steps = normalize(self.normalizer_fn, numbers).reshape(*numbers.shape[:2], self.width)
        return jnp.where(is_step[..., None], steps, self.default_value)

    @property
    def _numbers(self) -> SequenceNumbers:
        return SequenceNumbers(self.key, self.shape)


@explains_arguments
def sequence_numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: float = 0.0,
    dtype: DTypeLike = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> SequenceNumericColumn:
    """Returns a column of sequences of numbers, padded with NaN to equal length.

    Args:
      key: key of the feature; also the name of the column.
      shape: shape of a time step.
      default_value: value of the time steps after the end of a sequence.
      dtype: dtype of the numbers; the model receives float32.
      normalizer_fn: function of JAX arrays of shape `(rows, time, *shape)`; it runs on the device.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the shape or the dtype is invalid.

    Example:
      >>> sequence_numeric_column("temperature").name
      'temperature'

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/sequence_numeric_column.
    """
    arguments.require_functions(normalizer_fn=normalizer_fn)
    return SequenceNumericColumn(
        checks.as_key("key", key), checks.as_shape(shape), arguments.as_number("default_value", default_value),
        checks.as_numeric_dtype("dtype", dtype), normalizer_fn)


@explains_arguments
def sequence_categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> SequenceCategoricalColumn:
    """Returns a column of sequences of ids, padded with -1, with the arguments of `categorical_column_with_identity`.

    Example:
      >>> sequence_categorical_column_with_identity("watched", 100).num_buckets
      100

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/sequence_categorical_column_with_identity.
    """
    return SequenceCategoricalColumn(categorical_column_with_identity(key, num_buckets, default_value))


@explains_arguments
def sequence_categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Word],
    dtype: DTypeLike | None = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> SequenceCategoricalColumn:
    """Returns a column of sequences of words, padded with "" or -1.

    The arguments are the same as in `categorical_column_with_vocabulary_list`.

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column.
    """
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_list(key, vocabulary_list, dtype, default_value, num_oov_buckets))


@explains_arguments
def sequence_categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: DTypeLike = "string",
    file_format: str | None = None,
) -> SequenceCategoricalColumn:
    """Returns a column of sequences of words, padded with "" or -1.

    The arguments are the same as in `categorical_column_with_vocabulary_file`, in another order, as in TensorFlow.

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column.
    """
    return SequenceCategoricalColumn(categorical_column_with_vocabulary_file(
        key, vocabulary_file, vocabulary_size, dtype, default_value, num_oov_buckets, file_format))


@explains_arguments
def sequence_categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: DTypeLike = "string"
) -> SequenceCategoricalColumn:
    """Returns a column of sequences of words, padded with "" or -1.

    The arguments are the same as in `categorical_column_with_hash_bucket`.

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column.
    """
    return SequenceCategoricalColumn(categorical_column_with_hash_bucket(key, hash_bucket_size, dtype))
