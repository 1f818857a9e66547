"""Categorical columns whose ids are places in a vocabulary, given as a list or as a file."""

from __future__ import annotations

import abc
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.errors import MAX_ITEMS, wrong_type
from trainer.estimator.feature_columns.base import MISSING_ID
from trainer.estimator.feature_columns.keyed import KeyedColumn
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.fingerprints import fingerprint64
from trainer.estimator.feature_columns.values.raw_features import RawFeatures, missing_in

Word = str | bytes | int


@dataclasses.dataclass(frozen=True)
class _VocabularyColumn(KeyedColumn):
    """What columns of a list and of a file share."""

    key: str
    dtype: str
    default_value: int
    num_oov_buckets: int

    @property
    def kind(self) -> str:
        """See `LookedUpColumn`."""
        return "vocabulary"

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many words the vocabulary has."""

    @abc.abstractmethod
    def ids_of_words(self) -> Mapping[Any, int]:
        """Returns the id of each word: of bytes, or of ints."""

    @property
    def num_buckets(self) -> int:
        """See `CategoricalColumn`."""
        return self.size + self.num_oov_buckets

    def look_up(self, raw: RawFeatures) -> np.ndarray:
        """See `LookedUpColumn`."""
        categories, table = self.categories(raw), self.ids_of_words()
        values = categories.ravel().tolist()
        ids = np.array([table.get(value, MISSING_ID) for value in values], np.int64)
        unknown = (ids == MISSING_ID) & ~missing_in(categories).ravel()
        if self.num_oov_buckets:
            texts = [_as_hashed(values[place]) for place in np.flatnonzero(unknown).tolist()]
            buckets = fingerprint64(texts) % np.uint64(self.num_oov_buckets)
            ids[unknown] = self.size + buckets.astype(np.int64)
        else:
            ids[unknown] = self.default_value
        return ids.reshape(categories.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class VocabularyListColumn(_VocabularyColumn):
    """See `categorical_column_with_vocabulary_list`."""

    vocabulary_list: tuple[Word, ...]

    def __repr__(self) -> str:
        words = ", ".join(map(repr, self.vocabulary_list[:MAX_ITEMS]))
        more = f", ... ({self.size} in all)" if self.size > MAX_ITEMS else ""
        return (f"VocabularyListColumn(key={self.key!r}, vocabulary_list=({words}{more}), dtype={self.dtype!r}, "
                f"default_value={self.default_value}, num_oov_buckets={self.num_oov_buckets})")

    def __hash__(self) -> int:
        return hash((self.key, self.size, self.num_oov_buckets))  # and not of all words, at each look-up

    @property
    def size(self) -> int:
        """See the base class."""
        return len(self.vocabulary_list)

    def ids_of_words(self) -> Mapping[Any, int]:
        """See the base class."""
        return self._ids

    @functools.cached_property
    def _ids(self) -> dict[Any, int]:
        return {word if isinstance(word, int) else checks.as_text(word): place
                for place, word in enumerate(self.vocabulary_list)}


@dataclasses.dataclass(frozen=True)
class VocabularyFileColumn(_VocabularyColumn):
    """See `categorical_column_with_vocabulary_file`."""

    vocabulary_file: str
    vocabulary_size: int

    @property
    def size(self) -> int:
        """See the base class."""
        return self.vocabulary_size

    def ids_of_words(self) -> Mapping[Any, int]:
        """See the base class: the file is read when it is first needed, and again once it has changed."""
        status = os.stat(self.vocabulary_file)
        return _ids_of_lines(self.vocabulary_file, self.vocabulary_size, self.dtype,
                             (status.st_mtime_ns, status.st_size))


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Word],
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyListColumn:
    """Describes a feature of words, whose ids are their places in a list.

    Args:
      key: the key of the feature, and the column's name.
      vocabulary_list: strings, or whole numbers; none twice.
      dtype: "string" or an integer type; None for that of the vocabulary.
      default_value: the id of words that are not in the vocabulary; -1 leaves them out.
      num_oov_buckets: how many further ids such words get, by their fingerprint; at least 0.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if words are missing, repeated or of two types, `default_value` is no id, or it is given with
        `num_oov_buckets`.

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
        raise ValueError(f"`dtype` must be that of the vocabulary, {found!r}. Received: dtype={name!r}, for column "
                         f"{key!r}.")
    default_value, num_oov_buckets = _as_out_of_vocabulary(default_value, num_oov_buckets, len(words))
    return VocabularyListColumn(checks.as_key("key", key), name, default_value, num_oov_buckets, words)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: Any = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
    file_format: str | None = None,
) -> VocabularyFileColumn:
    """Describes a feature of words, whose ids are the numbers of their lines in a file.

    Args:
      key: the key of the feature, and the column's name.
      vocabulary_file: the path of a text file with one word a line; the first has id 0.
      vocabulary_size: how many lines are read; None for all.
      dtype: "string" or an integer type.
      default_value: the id of words that are not in the vocabulary; None and -1 leave them out.
      num_oov_buckets: how many further ids such words get, by their fingerprint; at least 0.
      file_format: None or "text".

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if there is no such file, it has too few lines, `default_value` is no id, or it is given with
        `num_oov_buckets`. When it is used, a file that repeats a word.

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/categorical_column_with_vocabulary_file.
    """
    path = arguments.as_path("vocabulary_file", vocabulary_file, "the path of a file with one word a line")
    if file_format not in (None, "text") or path.endswith("tfrecord.gz"):
        raise ValueError(f"`file_format` must be None or 'text': a file with one word a line. Received: {path!r} with "
                         f"file_format={file_format!r}.")
    if not os.path.isfile(path):
        raise ValueError(f"There is no vocabulary file {path!r}, for column {key!r}.")
    lines = len(_lines(path))
    size = lines if vocabulary_size is None else arguments.as_count("vocabulary_size", vocabulary_size)
    if not 1 <= size <= lines:
        raise ValueError(f"The vocabulary file {path!r} must have at least {max(size, 1)} lines. It has {lines}, for "
                         f"column {key!r}.")
    default = MISSING_ID if default_value is None else default_value
    default, num_oov_buckets = _as_out_of_vocabulary(default, num_oov_buckets, size)
    return VocabularyFileColumn(checks.as_key("key", key), checks.as_category_dtype("dtype", dtype), default,
                                num_oov_buckets, path, size)


def _as_out_of_vocabulary(default_value: Any, num_oov_buckets: Any, size: int) -> tuple[int, int]:
    default = arguments.as_count("default_value", default_value, MISSING_ID)
    buckets = arguments.as_count("num_oov_buckets", 0 if num_oov_buckets is None else num_oov_buckets, 0)
    if default >= size:
        raise ValueError(f"`default_value` must be an id of the vocabulary, from 0 to {size - 1}, or -1. Received: "
                         f"default_value={default}.")
    if buckets and default != MISSING_ID:
        raise ValueError(f"Only one of `default_value` and `num_oov_buckets` can be set. Received: "
                         f"default_value={default}, num_oov_buckets={buckets}.")
    return default, buckets


def _as_hashed(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _lines(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return file.read().replace(b"\r", b"").removesuffix(b"\n").split(b"\n") if os.path.getsize(path) else []


@functools.lru_cache(maxsize=64)
def _ids_of_lines(path: str, size: int, dtype: str, version: tuple[int, int]) -> dict[Any, int]:
    lines: list[Any] = _lines(path)[:size]
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
