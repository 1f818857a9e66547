"""Categorical columns with a vocabulary, from a list or a file."""

from __future__ import annotations

import abc
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.categories.hash_buckets import hash_buckets
from trainer.core.categories.vocabularies import positions, read_vocabulary
from trainer.core.errors import MAX_ITEMS, wrong_type
from trainer.estimator.feature_columns.base import MISSING_ID
from trainer.estimator.feature_columns.keyed import KeyedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in

Word = str | bytes | int


@dataclasses.dataclass(frozen=True)
class _VocabularyColumn(KeyedColumn):
    """Base class of vocabulary columns."""

    key: str
    dtype: str
    default_value: int
    num_oov_buckets: int

    @property
    def kind(self) -> str:
        return "vocabulary"

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of words in the vocabulary."""

    @abc.abstractmethod
    def ids_of_words(self) -> Mapping[Any, int]:
        """Returns the id of each word, with words as bytes or ints."""

    @property
    def num_buckets(self) -> int:
        return self.size + self.num_oov_buckets

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        categories, table = self.categories(raw), self.ids_of_words()
        values = categories.ravel().tolist()
        ids = positions(table, values)
        unknown = (ids == MISSING_ID) & ~missing_in(categories).ravel()
        if self.num_oov_buckets:
            ids[unknown] = self.size + hash_buckets(categories.ravel()[unknown], self.num_oov_buckets)
        else:
            ids[unknown] = self.default_value
        return ids.reshape(categories.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class VocabularyListColumn(_VocabularyColumn):
    """Column of `categorical_column_with_vocabulary_list`."""

    vocabulary_list: tuple[Word, ...]

    def __repr__(self) -> str:
        words = ", ".join(map(repr, self.vocabulary_list[:MAX_ITEMS]))
        more = f", ... ({self.size} in all)" if self.size > MAX_ITEMS else ""
        return (f"VocabularyListColumn(key={self.key!r}, vocabulary_list=({words}{more}), dtype={self.dtype!r}, "
                f"default_value={self.default_value}, num_oov_buckets={self.num_oov_buckets})")

    def __hash__(self) -> int:
        return hash((self.key, self.size, self.num_oov_buckets))  # hashing all words is too slow for each lookup

    @property
    def size(self) -> int:
        return len(self.vocabulary_list)

    def ids_of_words(self) -> Mapping[Any, int]:
        return self._ids

    @functools.cached_property
    def _ids(self) -> dict[Any, int]:
        return {word if isinstance(word, int) else checks.as_text(word): place
                for place, word in enumerate(self.vocabulary_list)}


@dataclasses.dataclass(frozen=True)
class VocabularyFileColumn(_VocabularyColumn):
    """Column of `categorical_column_with_vocabulary_file`."""

    vocabulary_file: str
    vocabulary_size: int

    @property
    def size(self) -> int:
        return self.vocabulary_size

    def ids_of_words(self) -> Mapping[Any, int]:
        """Returns the id of each word; reads the file on first use, and again after a change."""
        status = os.stat(self.vocabulary_file)
        return _ids_of_lines(self.vocabulary_file, self.vocabulary_size, self.dtype,
                             (status.st_mtime_ns, status.st_size))


@explains_arguments
def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Word],
    dtype: DTypeLike | None = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyListColumn:
    """Returns a column of words, with the positions in a list as ids.

    Args:
      key: key of the feature; also the name of the column.
      vocabulary_list: distinct strings or integers.
      dtype: "string" or an integer type; None for the dtype of the vocabulary.
      default_value: id of unknown words; -1 ignores them.
      num_oov_buckets: number of additional ids for unknown words, assigned by fingerprint; at least 0.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the vocabulary is empty or has repeated words, `dtype` does not match it, `default_value` is not a
        valid id, or both `default_value` and `num_oov_buckets` are set.

    Example:
      >>> categorical_column_with_vocabulary_list("color", ["red", "green"], num_oov_buckets=2).num_buckets
      4

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/categorical_column_with_vocabulary_list.
    """
    if isinstance(vocabulary_list, (str, bytes)) or not hasattr(vocabulary_list, "__iter__"):
        raise wrong_type("vocabulary_list", vocabulary_list, "a list of strings or whole numbers")
    words = tuple(word.item() if isinstance(word, np.generic) else word for word in vocabulary_list)
    if not words or len(set(words)) != len(words):
        raise ValueError(f"`vocabulary_list` must have words, and none twice. Received: {len(words)} words, "
                         f"{len(set(words))} of them different, for column {key!r}.")
    is_integer = all(isinstance(word, int) and not isinstance(word, bool) for word in words)
    if not is_integer and not all(isinstance(word, (str, bytes)) for word in words):
        raise TypeError(f"`vocabulary_list` must be all strings or all whole numbers. Received: others, for column "
                        f"{key!r}.")
    found = "int64" if is_integer else checks.STRING
    name = found if dtype is None else checks.as_category_dtype("dtype", dtype)
    if (name == checks.STRING) == is_integer:
        raise ValueError(f"`dtype` must match the vocabulary, {found!r}. Received: dtype={name!r}, for column "
                         f"{key!r}.")
    default_value, num_oov_buckets = _as_out_of_vocabulary(default_value, num_oov_buckets, len(words))
    return VocabularyListColumn(checks.as_key("key", key), name, default_value, num_oov_buckets, words)


@explains_arguments
def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: DTypeLike = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
    file_format: str | None = None,
) -> VocabularyFileColumn:
    """Returns a column of words, with the line numbers in a file as ids.

    Args:
      key: key of the feature; also the name of the column.
      vocabulary_file: path of a text file with one word per line; the first word has id 0.
      vocabulary_size: number of lines to read; None for all.
      dtype: "string" or an integer type.
      default_value: id of unknown words; None and -1 ignore them.
      num_oov_buckets: number of additional ids for unknown words, assigned by fingerprint; at least 0.
      file_format: None or "text".

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the file is missing or has too few lines, `default_value` is not a valid id, or both
        `default_value` and `num_oov_buckets` are set. A file with repeated words raises it on first use.

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/categorical_column_with_vocabulary_file.
    """
    path = arguments.as_path("vocabulary_file", vocabulary_file, "the path of a file with one word a line")
    if file_format not in (None, "text") or path.endswith("tfrecord.gz"):
        raise ValueError(f"`file_format` must be None or 'text': a file with one word a line. Received: {path!r} with "
                         f"file_format={file_format!r}.")
    if not os.path.isfile(path):
        raise ValueError(f"There is no vocabulary file {path!r}, for column {key!r}.")
    lines = len(read_vocabulary(path))
    size = lines if vocabulary_size is None else arguments.as_count("vocabulary_size", vocabulary_size)
    if not 1 <= size <= lines:
        raise ValueError(f"The vocabulary file {path!r} must have at least {max(size, 1)} lines. It has {lines}, for "
                         f"column {key!r}.")
    default = MISSING_ID if default_value is None else default_value
    default, num_oov_buckets = _as_out_of_vocabulary(default, num_oov_buckets, size)
    return VocabularyFileColumn(checks.as_key("key", key), checks.as_category_dtype("dtype", dtype), default,
                                num_oov_buckets, path, size)


def _as_out_of_vocabulary(default_value: object, num_oov_buckets: object, size: int) -> tuple[int, int]:
    default = arguments.as_count("default_value", default_value, MISSING_ID)
    buckets = arguments.as_count("num_oov_buckets", 0 if num_oov_buckets is None else num_oov_buckets, 0)
    if default >= size:
        raise ValueError(f"`default_value` must be an id of the vocabulary, from 0 to {size - 1}, or -1. Received: "
                         f"default_value={default}.")
    if buckets and default != MISSING_ID:
        raise ValueError(f"Only one of `default_value` and `num_oov_buckets` can be set. Received: "
                         f"default_value={default}, num_oov_buckets={buckets}.")
    return default, buckets


@functools.lru_cache(maxsize=64)
def _ids_of_lines(path: str, size: int, dtype: str, version: tuple[int, int]) -> dict[Any, int]:
    lines: list[Any] = read_vocabulary(path)[:size]
    if dtype != checks.STRING:
        try:
            lines = [int(line) for line in lines]
        except ValueError as error:
            raise ValueError(f"The vocabulary file {path!r} must have one whole number a line, as its column's dtype "
                             f"is {dtype!r}.") from error
    ids = {word: place for place, word in enumerate(lines)}
    if len(ids) < size:
        raise ValueError(f"The vocabulary file {path!r} must have each word once, in {size} lines. Received: "
                         f"{len(ids)} different words.")
    return ids
