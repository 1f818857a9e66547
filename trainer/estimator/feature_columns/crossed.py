"""The categorical column of crossed features, with chained fingerprints as ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.categories.fingerprints import DEFAULT_HASH_KEY, chain
from trainer.core.categories.hash_buckets import hashes
from trainer.core.errors import wrong_type
from trainer.estimator.feature_columns.base import MISSING_ID, CategoricalColumn, LookedUpColumn
from trainer.estimator.feature_columns.hashed import HashedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


@dataclasses.dataclass(frozen=True)
class CrossedColumn(LookedUpColumn):
    """Column of `crossed_column`."""

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None = None

    @property
    def name(self) -> str:
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.leaves))

    @property
    def kind(self) -> str:
        return "cross"

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """Keys and columns of the cross, with nested crosses flattened."""
        return tuple(leaf for key in self.keys for leaf in (key.leaves if isinstance(key, CrossedColumn) else (key,)))

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """Computes the ids of all combinations of a row's values; values of the last feature vary fastest."""
        return np.where(self.is_present(raw), self._buckets(raw), MISSING_ID)

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """Returns where all values of a combination are present."""
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
        # TensorFlow's operation takes sparse inputs, which are columns, before dense inputs, which are keys.
        return sorted(self.leaves, key=lambda leaf: isinstance(leaf, str))


@explains_arguments
def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Returns a column of combinations of features, with TensorFlow's ids.

    Each value of a feature is combined with each value of the other features in the row. A feature given by key is read
    as it is, including the empty string; a column skips missing values.

    Args:
      keys: at least two keys of features of strings or integers, or categorical columns.
      hash_bucket_size: number of ids; combinations may share an id.
      hash_key: initial value of the chain of fingerprints; None for TensorFlow's number.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if there are fewer than two keys, or a key is a column of hash buckets, weights or sequences.

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
    """Returns the fingerprints of a feature; integers are their own fingerprints."""
    if not isinstance(leaf, str):
        return leaf.host_ids(raw).view(np.uint64)
    categories = raw.categories(leaf)
    if categories.dtype != object:
        return categories.view(np.uint64)
    return raw.once(("fingerprints", leaf), lambda: hashes(categories))


def _pairs(first: np.ndarray, second: np.ndarray, combine: np.ufunc | object) -> np.ndarray:
    """Returns all combinations of the values of each row: `(rows, m)` and `(rows, n)` give `(rows, m * n)`."""
    combined = combine(first[:, :, None], second[:, None, :])  # type: ignore[operator]
    return combined.reshape(len(combined), -1)
