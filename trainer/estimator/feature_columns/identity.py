"""The categorical column of features that already are ids."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.estimator.feature_columns.keyed import KeyedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in


@dataclasses.dataclass(frozen=True)
class IdentityColumn(KeyedColumn):
    """Column of `categorical_column_with_identity`."""

    key: str
    number_buckets: int
    default_value: int | None = None
    dtype: str = dataclasses.field(default="int64", init=False, repr=False)

    @property
    def kind(self) -> str:
        return "identity"

    @property
    def num_buckets(self) -> int:
        return self.number_buckets

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """Returns the ids, with values out of range replaced by the default value.

        Raises:
          ValueError: if a value is too large and the column has no default value.
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


@explains_arguments
def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Returns a column of integer features that are ids.

    Args:
      key: key of the feature; also the name of the column.
      num_buckets: number of ids; ids range from 0 to `num_buckets - 1`.
      default_value: id of values out of range. With None, too large values raise an error when they are read, and
        negative values have no id. -1 is always a missing value.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `num_buckets` is less than 1, or `default_value` is not a valid id.

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
