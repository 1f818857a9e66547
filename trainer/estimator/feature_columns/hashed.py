"""The categorical column of hashed features."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.typing import DTypeLike

from trainer.core.calls.entry_points import explains_arguments
from trainer.core.categories.hash_buckets import hashes
from trainer.estimator.feature_columns.base import MISSING_ID
from trainer.estimator.feature_columns.keyed import KeyedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in


@dataclasses.dataclass(frozen=True)
class HashedColumn(KeyedColumn):
    """Column of `categorical_column_with_hash_bucket`."""

    key: str
    hash_bucket_size: int
    dtype: str = checks.STRING

    @property
    def kind(self) -> str:
        return "hash"

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        categories = self.categories(raw)
        prints = raw.once(("fingerprints", self.key), lambda: hashes(categories))
        ids = (prints % np.uint64(self.num_buckets)).astype(np.int64)
        return np.where(missing_in(categories), MISSING_ID, ids)


@explains_arguments
def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: DTypeLike = "string") -> HashedColumn:
    """Returns a column of strings or integers that are hashed into buckets, with TensorFlow's ids.

    The id is FarmHash's fingerprint of a string's bytes, or of an integer's decimal text, modulo the number of buckets.
    It is the same in every process. Values may share an id.

    Args:
      key: key of the feature; also the name of the column.
      hash_bucket_size: number of ids.
      dtype: "string" or an integer type.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `hash_bucket_size` is less than 1, or `dtype` is another type.

    Example:
      >>> categorical_column_with_hash_bucket("city", 1000)
      HashedColumn(key='city', hash_bucket_size=1000, dtype='string')

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/categorical_column_with_hash_bucket.
    """
    buckets = checks.as_buckets("hash_bucket_size", hash_bucket_size)
    return HashedColumn(checks.as_key("key", key), buckets, checks.as_category_dtype("dtype", dtype))
