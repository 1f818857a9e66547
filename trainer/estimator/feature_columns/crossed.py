"""The categorical column of combinations of features, whose ids are chained fingerprints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trainer.core import arguments
from trainer.core.errors import wrong_type
from trainer.estimator.feature_columns.base import MISSING_ID, CategoricalColumn, LookedUpColumn
from trainer.estimator.feature_columns.hashed import HashedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.fingerprints import DEFAULT_HASH_KEY, chain, fingerprint64
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


@dataclasses.dataclass(frozen=True)
class CrossedColumn(LookedUpColumn):
    """See `crossed_column`."""

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None = None

    @property
    def name(self) -> str:
        """See `FeatureColumn`."""
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.leaves))

    @property
    def kind(self) -> str:
        """See `LookedUpColumn`."""
        return "cross"

    @property
    def num_buckets(self) -> int:
        """See `CategoricalColumn`."""
        return self.hash_bucket_size

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """What is crossed, with nested crosses flattened."""
        return tuple(leaf for key in self.keys for leaf in (key.leaves if isinstance(key, CrossedColumn) else (key,)))

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """See `LookedUpColumn`: all combinations of a row's values, those of the last feature next to one another."""
        return np.where(self.is_present(raw), self._buckets(raw), MISSING_ID)

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """See `CategoricalColumn`: where all that is combined has a value."""
        present = np.ones((1, 1), bool)
        for leaf in self._in_tensorflows_order():
            there = np.ones_like(_prints(leaf, raw), bool) if isinstance(leaf, str) else leaf.is_present(raw)
            present = _pairs(present, there, np.logical_and)
        return present

    def _buckets(self, raw: RawFeatures) -> np.ndarray:
        prints = np.full((1, 1), self.hash_key or DEFAULT_HASH_KEY, np.uint64)
        for leaf in self._in_tensorflows_order():
            prints = _pairs(prints, _prints(leaf, raw), chain)
        return (prints % np.uint64(self.num_buckets)).astype(np.int64)

    def _in_tensorflows_order(self) -> list[str | CategoricalColumn]:
        # Its operation takes sparse inputs first, then dense ones. Columns are sparse there; features that are given
        # as arrays are dense.
        return sorted(self.leaves, key=lambda leaf: isinstance(leaf, str))


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Describes combinations of features. Their ids are those that TensorFlow gives them.

    Where a row has several values of a feature, each is combined with each of the others. A feature that is given by
    its key is read as it is, the empty string too; a column leaves missing values out.

    Args:
      keys: at least two of: keys of features of strings or whole numbers, and categorical columns.
      hash_bucket_size: how many ids there are; several combinations may share one.
      hash_key: what the chain of fingerprints starts from; None for TensorFlow's number.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if there are fewer than two keys, or one is a column of hash buckets or of weights or sequences.

    Example:
      >>> crossed_column(["country", "language"], 100).name
      'country_X_language'

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/crossed_column.
    """
    if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__"):
        raise wrong_type("keys", keys, "a list of keys and categorical columns")
    found = tuple(keys)
    for key in found:
        _check_crossed(key)
    if len(found) < 2:
        raise ValueError(f"`keys` must have at least two to cross. Received: {len(found)}.")
    if hash_key is not None:
        hash_key = arguments.as_count("hash_key", hash_key, 0) % 2**64
    return CrossedColumn(found, checks.as_buckets("hash_bucket_size", hash_bucket_size), hash_key)


def _check_crossed(key: object) -> None:
    if isinstance(key, HashedColumn):
        raise ValueError(f"A column of hash buckets cannot be crossed: more values would share an id. Give the key "
                         f"{key.key!r} in its place.")
    if not isinstance(key, (str, CategoricalColumn)):
        raise TypeError("`keys` must be keys and categorical columns. Received: a value of type "
                        f"{type(key).__name__}. Bucketize a numeric column: `bucketized_column(column, boundaries)`.")
    if isinstance(key, CategoricalColumn) and not key.is_crossable:
        raise ValueError(f"Column {key.name!r} cannot be crossed: weights and sequences are not combined. Give the "
                         "column without them.")


def _prints(leaf: str | CategoricalColumn, raw: RawFeatures) -> np.ndarray:
    """Returns a feature's fingerprints: whole numbers stand for themselves."""
    if not isinstance(leaf, str):
        return leaf.host_ids(raw).view(np.uint64)
    categories = raw.categories(leaf)
    if categories.dtype != object:
        return categories.view(np.uint64)
    return raw.once(("fingerprints", leaf),
                    lambda: fingerprint64(categories.ravel().tolist()).reshape(categories.shape))


def _pairs(first: np.ndarray, second: np.ndarray, combine: np.ufunc | object) -> np.ndarray:
    """Returns all combinations of the values of each row: `(rows, m)` and `(rows, n)` make `(rows, m * n)`."""
    combined = combine(first[:, :, None], second[:, None, :])  # type: ignore[operator]
    return combined.reshape(len(combined), -1)
