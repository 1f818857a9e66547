"""The categorical column of features that are ids already."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainer.core import arguments
from trainer.estimator.feature_columns.keyed import KeyedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in


@dataclasses.dataclass(frozen=True)
class IdentityColumn(KeyedColumn):
    """See `categorical_column_with_identity`."""

    key: str
    number_buckets: int
    default_value: int | None = None
    dtype: str = dataclasses.field(default="int64", init=False, repr=False)

    @property
    def kind(self) -> str:
        """See `LookedUpColumn`."""
        return "identity"

    @property
    def num_buckets(self) -> int:
        """See `CategoricalColumn`."""
        return self.number_buckets

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """See `LookedUpColumn`.

        Raises:
          ValueError: if a value is too large and there is no default value.
        """
        ids = self.categories(raw)
        too_large = ids >= self.num_buckets
        if self.default_value is not None:
            return np.where(too_large | (ids < 0) & ~missing_in(ids), self.default_value, ids)
        if too_large.any():
            raise ValueError(f"Column {self.name!r} takes values from 0 to {self.num_buckets - 1}, and feature "
                             f"{self.key!r} has {ids[too_large][0]}. Give the column more buckets, or a "
                             "`default_value` for what is out of range.")
        return ids


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Describes a feature of whole numbers that are ids.

    Args:
      key: the key of the feature, and the column's name.
      num_buckets: how many ids there are, from 0 to one less.
      default_value: the id of what is out of range. With None, numbers that are too large are an error when they are
        met, and negative ones have no id. -1 is a missing value in any case.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if `num_buckets` is less than 1, or `default_value` is no id.

    Example:
      >>> categorical_column_with_identity("weekday", 7)
      IdentityColumn(key='weekday', number_buckets=7, default_value=None)

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/categorical_column_with_identity.
    """
    buckets = checks.as_buckets("num_buckets", num_buckets)
    if default_value is not None:
        default_value = arguments.as_count("default_value", default_value, 0)
        if default_value >= buckets:
            raise ValueError(f"`default_value` must be an id, from 0 to {buckets - 1}. Received: "
                             f"default_value={default_value}.")
    return IdentityColumn(checks.as_key("key", key), buckets, default_value)
