"""The base class of lookups: a vocabulary, which `adapt` counts, and the indices of its words."""

from __future__ import annotations

import abc
import collections
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.categories.hash_buckets import hash_buckets
from trainer.core.categories.vocabularies import UNKNOWN, positions, read_vocabulary
from trainer.core.configs import Config
from trainer.core.errors import describe, wrong_type
from trainer.data.preprocessing.batches import chunks
from trainer.data.preprocessing.encoding import DROPPED, ENCODINGS, counted, encode
from trainer.data.preprocessing.hashing import as_salt
from trainer.data.preprocessing.layer import AdaptableLayer, Array, refuse_sparse
from trainer.data.sources.arrays import DataError

Word = Any
"""A str or an int."""
Vocabulary = Sequence[str] | Sequence[int] | np.ndarray | str | os.PathLike[str]

_OLD_NAMES = {"binary": "multi_hot", "tf-idf": "tf_idf"}


class IndexLookup(AdaptableLayer):
    """Replaces words by their indices in a vocabulary, or indices by words.

    Index 0 is the mask, if there is a mask and `output_mode="int"`. Then follow `num_oov_indices` indices for words
    outside of the vocabulary, then the words, the most frequent first.

    Args: see `StringLookup`, and `oov_method` of `IntegerLookup`.
    """

    _ignored = ("trainable", "dtype", "vocabulary_size")

    def __init__(
        self, max_tokens: int | None, num_oov_indices: int, mask_token: Word | None, oov_token: Word | None,
        vocabulary: Vocabulary | None, idf_weights: ArrayLike | None, invert: bool, output_mode: str,
        pad_to_max_tokens: bool, sparse: bool, oov_method: str, salt: int | Sequence[int] | None, name: str | None,
    ):
        super().__init__(name)
        refuse_sparse(sparse)
        arguments.require_bool(invert=invert, pad_to_max_tokens=pad_to_max_tokens)
        self.max_tokens = None if max_tokens is None else arguments.as_count("max_tokens", max_tokens, 2)
        self.num_oov_indices = arguments.as_count("num_oov_indices", num_oov_indices, 0)
        self.mask_token, self.oov_token = mask_token, oov_token
        self.output_mode = arguments.check_word("output_mode", _OLD_NAMES.get(output_mode, output_mode), (
            "int", *ENCODINGS, "tf_idf"))
        self.invert, self.pad_to_max_tokens = bool(invert), bool(pad_to_max_tokens)
        self.oov_method, self.salt = oov_method, as_salt(salt)
        if self.invert and self.output_mode != "int":
            raise ValueError("`invert=True` returns words, and output_mode must be 'int'. Received: output_mode="
                             f"{output_mode!r}.")
        if self.pad_to_max_tokens and self.max_tokens is None:
            raise ValueError("`pad_to_max_tokens=True` pads to `max_tokens`, which must be given.")
        if self.pad_to_max_tokens and self.output_mode == "int":
            raise ValueError("`pad_to_max_tokens=True` is for encodings, and indices have no width. Received: "
                             "output_mode='int'. Give `nn.Embed` the width `max_tokens`.")
        self._words: list[Word] | None = None
        self._ids: dict[Word, int] = {}
        self.idf_weights: np.ndarray | None = None
        self._is_given = vocabulary is not None
        self.reset_state()
        if vocabulary is not None:
            self.set_vocabulary(vocabulary, idf_weights)
        elif idf_weights is not None:
            raise ValueError("`idf_weights` belong to a `vocabulary`, which must be given with them.")

    # --- the vocabulary ----------------------------------------------------------------------------------------------

    def set_vocabulary(self, vocabulary: Vocabulary, idf_weights: ArrayLike | None = None) -> None:
        """Replaces the vocabulary.

        Args:
          vocabulary: distinct words, with or without the special tokens at the beginning, as `get_vocabulary` returns
            them; or the path of a text file with one word per line.
          idf_weights: for `output_mode="tf_idf"`, a weight for each word of `vocabulary`.

        Raises:
          TypeError: if `vocabulary` is of another kind.
          ValueError: if it is empty or has a word twice, has the mask among the words, is larger than `max_tokens`, or
            `idf_weights` do not fit.
          RuntimeError: if a compiled program holds the vocabulary as constants.
        """
        self._check_may_change()
        listed = self._listed(vocabulary)
        start, special = self._token_start, self._special_tokens
        has_special = listed[:start] == special
        words = listed[start:] if has_special else listed
        if not listed:
            raise ValueError("`vocabulary` must have at least one word. Received: an empty one.")
        self._check_words(words, special)
        self._set_words(words)
        if (self.output_mode == "tf_idf") != (idf_weights is not None):
            raise ValueError("`idf_weights` must be given with a vocabulary for output_mode='tf_idf', and for no other "
                             f"mode. Received: output_mode={self.output_mode!r}.")
        if idf_weights is not None:
            weights = arguments.as_numbers("idf_weights", idf_weights)
            if weights.shape != (len(listed),):
                raise ValueError(f"`idf_weights` must have a number for each word, in the shape {(len(listed),)}. "
                                 f"Received: {describe(weights)}.")
            front = np.full(start - (start if has_special else 0), np.average(weights))
            self._set_weights(np.concatenate([front, weights]))

    def _listed(self, vocabulary: Vocabulary) -> list[Word]:
        if isinstance(vocabulary, (str, os.PathLike)):
            path = arguments.as_path("vocabulary", vocabulary, "a list of words, or the path of a text file")
            if not os.path.isfile(path):
                raise ValueError(f"There is no vocabulary file {path!r}.")
            return self._words_of_lines(path, read_vocabulary(path))
        if not hasattr(vocabulary, "__iter__"):
            raise wrong_type("vocabulary", vocabulary, "a list of words, or the path of a text file")
        return [self._as_word(word) for word in vocabulary]

    def _check_words(self, words: list[Word], special: list[Word]) -> None:
        repeated = len(words) - len(set(words))
        if repeated:
            raise ValueError(f"`vocabulary` must have each word once. Received: {len(words)} words, of which "
                             f"{repeated} are repetitions.")
        reserved = {"mask_token": self.mask_token, "oov_token": self.oov_token if self.invert else None}
        for argument, token in reserved.items():
            if token is not None and token in words:
                raise ValueError(f"`vocabulary` has `{argument}` among its words. Leave the special tokens out, or put "
                                 f"them first, in this order: {special}.")
        size = self._token_start + len(words)
        if self.max_tokens is not None and size > self.max_tokens:
            raise ValueError(f"`vocabulary` must not be larger than `max_tokens`. Received: {size} words, special "
                             f"tokens included, and max_tokens={self.max_tokens}.")

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Word]:
        """Returns the words in the order of their indices; special tokens included, the first index is 0.

        Args:
          include_special_tokens: whether the list begins with the mask and the tokens for unknown words.
        """
        return [*(self._special_tokens if include_special_tokens else []), *(self._words or [])]

    def vocabulary_size(self) -> int:
        """Returns the number of words, special tokens included."""
        return self._token_start + len(self._words or [])

    @property
    def _oov_start(self) -> int:
        return int(self.mask_token is not None and self.output_mode == "int")

    @property
    def _token_start(self) -> int:
        return self._oov_start + self.num_oov_indices

    @property
    def _special_tokens(self) -> list[Word]:
        """The mask and the tokens for unknown words, which have the first indices."""
        return [self.mask_token] * self._oov_start + [self.oov_token] * self.num_oov_indices

    def _set_words(self, words: list[Word]) -> None:
        self._words = words
        self._ids = dict(zip(words, range(self._token_start, self.vocabulary_size()), strict=True))
        if self.mask_token is not None:
            self._ids[self.mask_token] = 0 if self.output_mode == "int" else DROPPED
        self.idf_weights = None

    def _set_weights(self, weights: np.ndarray) -> None:
        self.idf_weights = np.pad(weights.astype(np.float32), (0, self._depth - len(weights)))

    @property
    def _depth(self) -> int:
        return self.max_tokens if self.pad_to_max_tokens and self.max_tokens else self.vocabulary_size()

    # --- adapt -------------------------------------------------------------------------------------------------------

    @property
    def is_adaptable(self) -> bool:
        return not self._is_given

    def reset_state(self) -> None:
        self._counts: collections.Counter[Word] = collections.Counter()
        self._documents: collections.Counter[Word] = collections.Counter()
        self._num_documents = 0

    def update_state(self, data: np.ndarray) -> None:
        """Counts the words of a batch. For `output_mode="tf_idf"`, each row is a document; a single axis is one row."""
        rows = data.reshape(1, -1) if data.ndim < 2 else data
        for part in chunks(rows):
            words = self._as_words(part)
            self._counts.update(words)
            if self.output_mode == "tf_idf":
                width = len(words) // len(part)
                self.count_documents(words[start:start + width] for start in range(0, len(words), max(width, 1)))

    def _update_with_whole(self, array: np.ndarray) -> None:
        self.update_state(array[:, None] if array.ndim == 1 else array)

    def count_words(self, words: list[Word]) -> None:
        """Counts words of documents that `count_documents` counts."""
        self._counts.update(words)

    def count_documents(self, documents: Any) -> None:
        """Counts the documents that have each word.

        Args:
          documents: an iterable of lists of words.
        """
        for document in documents:
            self._documents.update(set(document))
            self._num_documents += 1

    def finalize_state(self) -> None:
        for token in (self.mask_token, self.oov_token):
            self._counts.pop(token, None)
        if not self._counts:
            raise DataError(f"{type(self).__name__}.adapt needs at least one word. Received: data without any.")
        # Keras breaks ties by the words, the last first.
        ordered = sorted(self._counts.items(), key=lambda item: (item[1], item[0]), reverse=True)
        if self.max_tokens is not None:
            ordered = ordered[:self.max_tokens - self._token_start]
        self._set_words([word for word, _ in ordered])
        if self.output_mode == "tf_idf":
            documents = np.array([self._documents[word] for word, _ in ordered], np.int64)
            weights = np.log(1 + self._num_documents / (1 + documents)).astype(np.float32)
            # The documents of unknown words are not known: they have the mean weight.
            self._set_weights(np.concatenate([np.full(self._token_start, weights.mean()), weights]))
        self.reset_state()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _check_has_vocabulary(self) -> list[Word]:
        if self._words is None:
            raise ValueError("The layer has no vocabulary: call its `adapt(data)`, or give it `vocabulary`.")
        return self._words

    def indices_of(self, words: list[Word]) -> np.ndarray:
        """Returns the index of each word as int64, `encoding.DROPPED` for masks that are not encoded.

        Raises:
          ValueError: if there is no vocabulary, or a word is unknown and there is no index for it.
        """
        self._check_has_vocabulary()
        indices = positions(self._ids, words)
        unknown = np.flatnonzero(indices == UNKNOWN)
        if unknown.size and not self.num_oov_indices:
            raise DataError(f"{type(self).__name__} has `num_oov_indices=0`, and all words must be in its vocabulary. "
                            f"Received: {unknown.size} of {len(words)} words that are not. Set `num_oov_indices=1`.")
        if unknown.size:
            indices[unknown] = self._oov_start + (
                self._oov_buckets([words[place] for place in unknown.tolist()]) if self.num_oov_indices > 1 else 0)
        return indices

    def encoded(self, indices: Array) -> Array:
        """Returns indices as `output_mode` says."""
        dtype = np.dtype(np.int32 if isinstance(indices, jax.Array) else np.int64)
        if self.output_mode != "tf_idf":
            return encode(indices, self.output_mode, self._depth, dtype)
        assert self.idf_weights is not None
        return encode(indices, "count", self._depth, dtype).astype(np.float32) * self.idf_weights

    def encoded_rows(self, owners: np.ndarray, indices: np.ndarray, rows: int) -> np.ndarray:
        """Returns the encoding of rows of different lengths, as `output_mode` says.

        Args:
          owners: the row of each index.
          indices: indices.
          rows: number of rows.
        """
        counts = counted(owners, indices, (rows, self._depth)).astype(np.int64)
        if self.output_mode == "tf_idf":
            assert self.idf_weights is not None
            return counts.astype(np.float32) * self.idf_weights
        return np.minimum(counts, 1) if self.output_mode == "multi_hot" else counts

    def words_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the words of an array of indices; `oov_token` for indices without a word."""
        self._check_has_vocabulary()
        if self.oov_token is None:
            raise DataError(f"{type(self).__name__} with `invert=True` needs an `oov_token` for unknown indices.")
        vocabulary = self.get_vocabulary()
        words = np.array([*vocabulary, self.oov_token])
        is_known = (indices >= 0) & (indices < len(vocabulary))
        found: np.ndarray = words[np.where(is_known, indices, len(vocabulary))]
        return found

    def get_config(self) -> Config:
        vocabulary = None if self._words is None else self.get_vocabulary()
        weights = None if self.idf_weights is None else self.idf_weights[:self.vocabulary_size()].tolist()
        return {"max_tokens": self.max_tokens, "num_oov_indices": self.num_oov_indices, "mask_token": self.mask_token,
                "oov_token": self.oov_token, "vocabulary": vocabulary, "idf_weights": weights, "invert": self.invert,
                "output_mode": self.output_mode, "pad_to_max_tokens": self.pad_to_max_tokens,
                "salt": None if self.salt is None else list(self.salt), "name": self.name}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocabulary_size()} words, output_mode={self.output_mode!r})"

    @abc.abstractmethod
    def _as_word(self, word: object) -> Word:
        """Returns a word of a vocabulary that was given; raises TypeError for another kind."""

    @abc.abstractmethod
    def _words_of_lines(self, path: str, lines: list[bytes]) -> list[Word]:
        """Returns the words of the lines of a vocabulary file."""

    @abc.abstractmethod
    def _as_words(self, values: np.ndarray) -> list[Word]:
        """Returns the values of an array as a flat list of words."""

    @abc.abstractmethod
    def _oov_buckets(self, words: list[Word]) -> np.ndarray:
        """Returns the bucket of each unknown word, from 0 to `num_oov_indices - 1`."""

    def _hashed(self, categories: np.ndarray) -> np.ndarray:
        return hash_buckets(categories, self.num_oov_indices, self.salt)
