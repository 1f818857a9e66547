"""Categorical columns that read one feature: where it is missing, and whether it holds what the column is for."""

from __future__ import annotations

import numpy as np

from trainer.estimator.feature_columns.base import LookedUpColumn
from trainer.estimator.feature_columns.values.checks import STRING
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in


class KeyedColumn(LookedUpColumn):
    """A categorical column of one feature of strings or of whole numbers.

    Attributes:
      key: the feature's key, and the column's name.
      dtype: "string", or the name of an integer type.
    """

    key: str
    dtype: str

    @property
    def name(self) -> str:
        """See `FeatureColumn`."""
        return self.key

    def categories(self, raw: RawFeatures) -> np.ndarray:
        """Returns the feature as int64 or as an object array of bytes, by the column's dtype.

        Raises:
          ValueError: if there is no such feature, or it holds values of the other type.
        """
        categories = raw.categories(self.key)
        if (categories.dtype == object) != (self.dtype == STRING):
            received, fix = ("strings", "astype(int)") if categories.dtype == object else (
                "whole numbers", "astype(str)")
            raise ValueError(f"Column {self.name!r} has dtype {self.dtype!r}, and feature {self.key!r} holds "
                             f"{received}. Give the column the feature's dtype, or convert the feature by `{fix}`.")
        return categories

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """See `CategoricalColumn`."""
        return ~missing_in(self.categories(raw))
