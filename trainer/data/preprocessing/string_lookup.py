"""StringLookup: strings to indices in a vocabulary, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import wrong_type
from trainer.data.preprocessing.batches import as_integers, as_texts
from trainer.data.preprocessing.hashing import as_objects, on_host
from trainer.data.preprocessing.index_lookup import IndexLookup, Vocabulary

_FIX = ("Fill them, by `fillna(\"missing\")` in data frames, or make the layer with a `mask_token`, such as "
        "`mask_token=\"\"`, whose index they get.")


class StringLookup(IndexLookup):
    """Replaces strings by their indices in a vocabulary, on the host.

    The vocabulary is given, or counted by `adapt`: the most frequent string first, and equally frequent strings in
    reverse alphabetical order. The first index is the mask, if there is a mask; then follow the indices of unknown
    strings.

    Args:
      max_tokens: maximum size of the vocabulary, including special tokens; None for no maximum.
      num_oov_indices: number of indices for strings outside of the vocabulary, chosen by a hash. With 0, such strings
        are an error.
      mask_token: a string that stands for missing values (None, NaN, NA), which are refused without it. With
        `output_mode="int"` its index is 0; encodings leave it out.
      oov_token: the string of unknown indices, for `invert=True`.
      vocabulary: a list of strings, or the path of a text file with one string per line; `adapt` is then not needed.
      idf_weights: for `output_mode="tf_idf"`, a weight for each string of `vocabulary`.
      invert: whether to replace indices by strings.
      output_mode: "int" for int64 indices; "one_hot", "multi_hot" or "count", see `CategoryEncoding`; "tf_idf" for
        counts times weights, which are larger for strings of fewer rows.
      pad_to_max_tokens: whether encodings have the width `max_tokens`, also with a smaller vocabulary.
      sparse: must be False.
      encoding: encoding of strings that are bytes.
      name: name of the layer.
      salt: key of the hash, see `Hashing`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if arguments are out of range or contradict each other, or `sparse` is True.

    Example:
      >>> lookup = StringLookup()
      >>> lookup.adapt(["red", "green", "red", "blue"])
      >>> lookup.get_vocabulary()
      ['[UNK]', 'red', 'green', 'blue']
      >>> lookup(["green", "yellow"]).tolist()
      [2, 0]
      >>> StringLookup(vocabulary=lookup.get_vocabulary(), invert=True)([2, 0]).tolist()
      ['green', '[UNK]']

    Source: `keras.layers.StringLookup`.
    """

    not_a_layer = "It makes numbers of text on the host: `dataset.map(lambda x, y: (layer(x), y))` with a {}."

    def __init__(
        self, max_tokens: int | None = None, num_oov_indices: int = 1, mask_token: str | None = None,
        oov_token: str | None = "[UNK]", vocabulary: Vocabulary | None = None, idf_weights: ArrayLike | None = None,
        invert: bool = False, output_mode: str = "int", pad_to_max_tokens: bool = False, sparse: bool = False,
        encoding: str = "utf-8", name: str | None = None, salt: int | Sequence[int] | None = None,
    ):
        arguments.require_text(encoding=encoding)
        self.encoding = encoding
        for argument, token in (("mask_token", mask_token), ("oov_token", oov_token)):
            if token is not None and not isinstance(token, str):
                raise wrong_type(argument, token, "a string or None")
        super().__init__(max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, idf_weights, invert,
                         output_mode, pad_to_max_tokens, sparse, "farmhash", salt, name)

    def __call__(self, inputs: ArrayLike) -> np.ndarray:
        """Returns the indices of strings, or their encoding; with `invert=True`, the strings of indices.

        Raises:
          TypeError: if `inputs` are traced by JAX, which has no text.
          ValueError: if there is no vocabulary, or `inputs` are of another kind or have missing values without a mask.
        """
        array = on_host("StringLookup", inputs)
        if self.invert:
            return self.words_of(as_integers("StringLookup", array, fix="Their strings are not known."))
        return np.asarray(self.encoded(self.indices_of(self._as_words(array)).reshape(array.shape)))

    def get_config(self) -> Config:
        return {**super().get_config(), "encoding": self.encoding}

    def _as_word(self, word: object) -> str:
        if not isinstance(word, (str, bytes)):
            raise wrong_type("vocabulary", word, "a list of strings, or the path of a text file")
        return word.decode(self.encoding) if isinstance(word, bytes) else str(word)

    def _words_of_lines(self, path: str, lines: list[bytes]) -> list[str]:
        return [line.decode(self.encoding) for line in lines]

    def _as_words(self, values: np.ndarray) -> list[str]:
        return as_texts(type(self).__name__, values, self.encoding, self.mask_token, _FIX)

    def _oov_buckets(self, words: list[str]) -> np.ndarray:
        return self._hashed(as_objects(words, (len(words),), self.encoding))
