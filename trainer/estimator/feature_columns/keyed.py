"""Base class of categorical columns of a single feature."""

from __future__ import annotations

import numpy as np

from trainer.estimator.feature_columns.base import LookedUpColumn
from trainer.estimator.feature_columns.values.checks import STRING
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in


class KeyedColumn(LookedUpColumn):
    """A categorical column of a feature of strings or integers.

    Attributes:
      key: key of the feature; also the name of the column.
      dtype: "string", or the name of an integer type.
    """

    key: str
    dtype: str

    @property
    def name(self) -> str:
        return self.key

    def categories(self, raw: RawFeatures) -> np.ndarray:
        """Returns the feature as int64 or as an object array of bytes, depending on the column's dtype.

        Raises:
          ValueError: if the feature is missing or does not match the column's dtype.
        """
        categories = raw.categories(self.key)
        if (categories.dtype == object) != (self.dtype == STRING):
            received, fix = ("strings", "astype(int)") if categories.dtype == object else (
                "whole numbers", "astype(str)")
            raise ValueError(f"Column {self.name!r} has dtype {self.dtype!r}, and feature {self.key!r} holds "
                             f"{received}. Give the column the feature's dtype, or convert the feature by `{fix}`.")
        return categories

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        return ~missing_in(self.categories(raw))
