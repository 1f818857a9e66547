"""TextVectorization: raw texts to indices of their words, or to counts."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config, get_registered_object, to_config
from trainer.core.errors import describe, wrong_type
from trainer.data.preprocessing.batches import as_texts, chunks
from trainer.data.preprocessing.hashing import on_host
from trainer.data.preprocessing.index_lookup import Vocabulary
from trainer.data.preprocessing.layer import AdaptableLayer
from trainer.data.preprocessing.string_lookup import StringLookup
from trainer.data.sources.arrays import DataError

Standardize = Callable[[np.ndarray], Any]
Split = Callable[[np.ndarray], Any]

# As TensorFlow: letters and punctuation of ASCII, and its white space.
_LOWER: dict[int, int | None] = {**str.maketrans(string.ascii_uppercase, string.ascii_lowercase)}
_STRIP: dict[int, int | None] = {ord(mark): None for mark in string.punctuation}
_TABLES = {"lower": _LOWER, "strip_punctuation": _STRIP, "lower_and_strip_punctuation": {**_LOWER, **_STRIP}}
_WORDS = re.compile(r"[^ \t\n\r\v\f]+")


class TextVectorization(AdaptableLayer):
    """Replaces texts by the indices of their words, or by counts of words, on the host.

    A text is standardized and split into words or n-grams, which are looked up in a vocabulary. The vocabulary is
    given, or counted by `adapt`, as in `StringLookup`. Index 0 is padding, and index 1 is for unknown words.

    Args:
      max_tokens: maximum size of the vocabulary, including special tokens; None for no maximum.
      standardize: "lower_and_strip_punctuation", "lower" or "strip_punctuation", which change characters of ASCII only,
        as in Keras; a function from an array of str to an array of the same shape; or None.
      split: "whitespace", "character", None, or a function from an array of str, of shape `(rows,)`, to a list of words
        for each row.
      ngrams: n for n-grams of 1 to n words, or a tuple of sizes; None for single words.
      output_mode: "int" for int64 indices of shape `(rows, words)`, padded with 0; "multi_hot", "count" or "tf_idf" for
        a vector as long as the vocabulary, see `StringLookup`.
      output_sequence_length: for "int", the number of indices of each text, which is cut or padded. None pads to the
        longest text of a call; a model then compiles for each such length.
      pad_to_max_tokens: whether vectors have the width `max_tokens`, also with a smaller vocabulary.
      vocabulary: a list of words, or the path of a text file with one word per line.
      idf_weights: for "tf_idf", a weight for each word of `vocabulary`.
      sparse, ragged: must be False.
      encoding: encoding of texts that are bytes.
      name: name of the layer.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if arguments are out of range or contradict each other, or `sparse` or `ragged` is True.

    Example:
      >>> layer = TextVectorization(output_sequence_length=4)
      >>> layer.adapt(["Foo bar!", "bar, baz", "baz bada boom"])
      >>> layer.get_vocabulary()
      ['', '[UNK]', 'baz', 'bar', 'foo', 'boom', 'bada']
      >>> layer(["foo qux bar", "qux baz"]).tolist()
      [[4, 1, 3, 0], [1, 2, 0, 0]]

    Source: `keras.layers.TextVectorization`.
    """

    _ignored = ("trainable", "dtype", "vocabulary_size")
    not_a_layer = "It makes numbers of text on the host: `dataset.map(lambda x, y: (layer(x), y))` with a {}."

    def __init__(
        self, max_tokens: int | None = None, standardize: str | Standardize | None = "lower_and_strip_punctuation",
        split: str | Split | None = "whitespace", ngrams: int | Sequence[int] | None = None, output_mode: str = "int",
        output_sequence_length: int | None = None, pad_to_max_tokens: bool = False,
        vocabulary: Vocabulary | None = None, idf_weights: ArrayLike | None = None, sparse: bool = False,
        ragged: bool = False, encoding: str = "utf-8", name: str | None = None,
    ):
        super().__init__(name)
        if ragged:
            raise ValueError("`ragged=True` is not supported: JAX's arrays have rows of one length. Set "
                             "`output_sequence_length`, or group texts of similar length by `trainer.data.bucketed`.")
        self.standardize, self.split = standardize, split
        for argument, value, words in (("standardize", standardize, tuple(_TABLES)),
                                       ("split", split, ("whitespace", "character"))):
            if value is not None and not callable(value):
                arguments.check_word(argument, value, words, f"{', '.join(map(repr, words))}, a function or None")
        self.ngrams = ngrams if isinstance(ngrams, int) or ngrams is None else tuple(ngrams)
        widths = range(1, self.ngrams + 1) if isinstance(self.ngrams, int) else self.ngrams or ()
        self._widths = tuple(arguments.as_count("ngrams", width) for width in widths)
        if ngrams is not None and not self._widths:
            raise ValueError("`ngrams` must be a whole number of at least 1, or several. Received: none.")
        if output_mode == "one_hot":
            raise ValueError("`output_mode='one_hot'` is not supported for texts. Use 'multi_hot' for a vector for "
                             "each text, or 'int' and `nn.Embed` or `CategoryEncoding` for one for each word.")
        self.output_sequence_length = None if output_sequence_length is None else arguments.as_count(
            "output_sequence_length", output_sequence_length)
        if output_mode != "int" and output_sequence_length is not None:
            raise ValueError("`output_sequence_length` is for output_mode='int'. Received: output_mode="
                             f"{output_mode!r}.")
        self._lookup = StringLookup(max_tokens, mask_token="", vocabulary=vocabulary, idf_weights=idf_weights,
                                    output_mode=output_mode, pad_to_max_tokens=pad_to_max_tokens, sparse=sparse,
                                    encoding=encoding)
        self.output_mode = self._lookup.output_mode

    # --- the vocabulary ----------------------------------------------------------------------------------------------

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[str]:
        """Returns the words in the order of their indices; see `StringLookup.get_vocabulary`."""
        return self._lookup.get_vocabulary(include_special_tokens)

    def set_vocabulary(self, vocabulary: Vocabulary, idf_weights: ArrayLike | None = None) -> None:
        """Replaces the vocabulary; see `StringLookup.set_vocabulary`."""
        self._lookup.set_vocabulary(vocabulary, idf_weights)

    def vocabulary_size(self) -> int:
        """Returns the number of words, special tokens included."""
        return self._lookup.vocabulary_size()

    # --- adapt -------------------------------------------------------------------------------------------------------

    @property
    def is_adaptable(self) -> bool:
        return self._lookup.is_adaptable

    def reset_state(self) -> None:
        self._lookup.reset_state()

    def update_state(self, data: np.ndarray) -> None:
        """Counts the words of a batch; each text is a document for `output_mode="tf_idf"`."""
        for part in chunks(np.atleast_1d(data)):
            documents = self._documents(part)
            self._lookup.count_words(list(itertools.chain.from_iterable(documents)))
            if self.output_mode == "tf_idf":
                self._lookup.count_documents(documents)

    def finalize_state(self) -> None:
        self._lookup.finalize_state()

    # --- calls -------------------------------------------------------------------------------------------------------

    def __call__(self, inputs: ArrayLike) -> np.ndarray:
        """Returns the indices of words, of shape `(rows, words)`, or a vector for each text.

        Args:
          inputs: texts of shape `(rows,)` or `(rows, 1)`; or one text, whose result has no axis of rows. Missing texts
            (None, NaN, NA) are empty. With `split=None`, words of shape `(rows, words)`.

        Raises:
          TypeError: if `inputs` are traced by JAX, which has no text.
          ValueError: if there is no vocabulary, or `inputs` are not text or have another shape.
        """
        array = on_host("TextVectorization", inputs)
        documents = self._documents(np.atleast_1d(array))
        indices = self._lookup.indices_of(list(itertools.chain.from_iterable(documents)))
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        owners = np.repeat(np.arange(len(documents)), lengths)
        if self.output_mode == "int":
            width = self.output_sequence_length or int(lengths.max(initial=0))
            places = np.arange(len(indices)) - np.repeat(lengths.cumsum() - lengths, lengths)
            result, shown = np.zeros((len(documents), width), np.int64), places < width
            result[owners[shown], places[shown]] = indices[shown]
        else:
            result = self._lookup.encoded_rows(owners, indices, len(documents))
        return result[0] if array.ndim == 0 else result

    def _documents(self, array: np.ndarray) -> list[list[str]]:
        """Returns the words, or n-grams, of each text."""
        if self.split is None and array.ndim != 2:
            raise DataError("TextVectorization with split=None takes words, of shape (rows, words). Received: "
                            f"{describe(array)}.")
        if self.split is not None and array.ndim > 1:
            if array.ndim > 2 or array.shape[1] != 1:
                raise DataError("TextVectorization takes texts, of shape (rows,) or (rows, 1). Received: "
                                f"{describe(array)}. Call it for each column, or set `split=None` for words.")
            array = array[:, 0]
        shape = array.shape
        texts = as_texts("TextVectorization", array, self._lookup.encoding, missing="")
        if callable(self.standardize):
            array = np.asarray(self.standardize(_as_array(texts, shape)))
            if array.shape != shape:
                raise DataError(f"`standardize` must return an array of the shape {shape}. Received: "
                                f"{describe(array)}.")
            texts = as_texts("TextVectorization", array, self._lookup.encoding)
        elif self.standardize is not None:
            table = _TABLES[self.standardize]
            texts = [text.translate(table) for text in texts]
        documents = self._split(texts, shape)
        return [_ngrams(words, self._widths) for words in documents] if self._widths else documents

    def _split(self, texts: list[str], shape: tuple[int, ...]) -> list[list[str]]:
        if self.split == "whitespace":
            return [_WORDS.findall(text) for text in texts]
        if self.split == "character":
            return [list(text) for text in texts]
        if self.split is None:
            return [texts[start:start + shape[1]] for start in range(0, len(texts), max(shape[1], 1))]
        assert callable(self.split)
        documents = [[str(word) for word in words] for words in self.split(_as_array(texts, shape))]
        if len(documents) != len(texts):
            raise DataError("`split` must return a list of words for each text. Received: "
                            f"{len(documents)} for {len(texts)} texts.")
        return documents

    # --- plain data --------------------------------------------------------------------------------------------------

    def get_config(self) -> Config:
        lookup = self._lookup.get_config()
        functions = {argument: to_config(value, "data.preprocessing") if callable(value) else value
                     for argument, value in (("standardize", self.standardize), ("split", self.split))}
        return {"max_tokens": lookup["max_tokens"], **functions,
                "ngrams": list(self.ngrams) if isinstance(self.ngrams, tuple) else self.ngrams,
                "output_mode": lookup["output_mode"], "output_sequence_length": self.output_sequence_length,
                "pad_to_max_tokens": lookup["pad_to_max_tokens"], "vocabulary": lookup["vocabulary"],
                "idf_weights": lookup["idf_weights"], "encoding": lookup["encoding"], "name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the layer of a configuration.

        Raises:
          ValueError: if a function for `standardize` or `split` is not registered under its name.
        """
        config = dict(config)
        for argument in ("standardize", "split"):
            if isinstance(config.get(argument), Mapping):
                config[argument] = _registered(argument, config[argument])
        return super().from_config(config)

    def __repr__(self) -> str:
        return f"TextVectorization({self.vocabulary_size()} words, output_mode={self.output_mode!r})"


def _registered(argument: str, config: Mapping[str, Any]) -> Standardize:
    name = config["config"]["name"] if isinstance(config.get("config"), Mapping) else config.get("config")
    function = get_registered_object(str(name))
    if function is None:
        raise ValueError(f"`{argument}` is a function of yours, {name!r}, which files do not hold. Register it before "
                         "saving and loading, by `@trainer.utils.register_keras_serializable()`.")
    if not callable(function):
        raise wrong_type(argument, function, "a function")
    return function


def _as_array(texts: list[str], shape: tuple[int, ...]) -> np.ndarray:
    return np.array(texts, np.str_).reshape(shape)


def _ngrams(words: list[str], widths: tuple[int, ...]) -> list[str]:
    """Returns the sequences of words of each width, joined by spaces, as `tf.strings.ngrams` orders them."""
    return [" ".join(words[start:start + width]) for width in widths for start in range(len(words) - width + 1)]
