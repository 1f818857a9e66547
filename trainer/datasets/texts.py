"""Texts as word numbers, prepared as in Keras: reviews of IMDB and news of Reuters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.errors import brief, naming_file
from trainer.core.files import check_expansion, read_json
from trainer.datasets.keras_files import Split, npz_arrays, path_of, shuffled, shuffled_split

_WORD_BYTES = 8  # of a number in a list
_TOPICS = """
    cocoa grain veg-oil earn acq wheat copper housing money-supply coffee sugar trade reserves ship cotton
    carcass crude nat-gas cpi money-fx interest gnp meal-feed alum oilseed gold tin strategic-metal livestock
    retail ipi iron-steel rubber heat jobs lei bop zinc orange pet-chem dlr gas silver wpi hog lead
"""


class imdb:
    """Reviews of films: 50,000 texts as word numbers, and their labels, positive or negative."""

    @staticmethod
    def load_data(
        path: str | os.PathLike[str] = "imdb.npz", num_words: int | None = None, skip_top: int = 0,
        maxlen: int | None = None, seed: int = 113, start_char: int | None = 1, oov_char: int | None = 2,
        index_from: int | None = 3,
    ) -> Split:
        """Returns 25,000 training texts and 25,000 test texts, as arrays of lists, and labels of 0 and 1.

        Words are numbered by frequency. `trainer.utils.pad_sequences` converts the lists to an array.

        Args:
          path: name of the file in the cache folder, or the path of a copy; see `mnist.load_data`.
          num_words: number of most frequent words to keep; None for all.
          skip_top: number of most frequent words to drop.
          maxlen: texts of at least this many words are dropped.
          seed: seed of the order.
          start_char: number at the beginning of each text; None for no such number.
          oov_char: number that replaces dropped words; None to remove them.
          index_from: offset of the word numbers.

        Raises:
          ValueError: if no text is left, or the file has data other than numbers. Nothing in it is executed.

        Source: https://keras.io/api/datasets/imdb/.
        """
        path = path_of(path, "imdb.npz")
        found = npz_arrays(path, "x_train", "y_train", "x_test", "y_test")
        _check_texts(path, *found)
        random, parts = np.random.RandomState(arguments.as_seed("seed", seed)), []
        for texts, labels in (found[:2], found[2:]):
            order = shuffled(len(texts), random)
            parts.append(_shorter(_begun(texts[order], start_char, index_from), labels[order], maxlen))
        (train, train_labels), (test, test_labels) = parts
        kept = _with_rare_words(train + test, num_words, skip_top, oov_char)
        count = len(train)
        return (_as_objects(kept[:count]), train_labels), (_as_objects(kept[count:]), test_labels)

    @staticmethod
    def get_word_index(path: str | os.PathLike[str] = "imdb_word_index.json") -> dict[str, int]:
        """Returns the number of each word, to which `load_data` adds `index_from`.

        Args:
          path: name of the file in the cache folder, or the path of a copy.
        """
        return _word_index(path_of(path, "imdb_word_index.json"))


class reuters:
    """News of Reuters: 11,228 texts as word numbers, and their topics, of 46."""

    @staticmethod
    def load_data(
        path: str | os.PathLike[str] = "reuters.npz", num_words: int | None = None, skip_top: int = 0,
        maxlen: int | None = None, test_split: float = 0.2, seed: int = 113, start_char: int | None = 1,
        oov_char: int | None = 2, index_from: int | None = 3,
    ) -> Split:
        """Returns texts, as arrays of lists, and the numbers of their topics, for training and for testing.

        Args:
          path: name of the file in the cache folder, or the path of a copy; see `mnist.load_data`.
          num_words: number of most frequent words to keep; None for all.
          skip_top: number of most frequent words to drop.
          maxlen: texts of at least this many words are dropped.
          test_split: fraction of the texts for testing.
          seed: seed of the order.
          start_char: number at the beginning of each text; None for no such number.
          oov_char: number that replaces dropped words; None to remove them.
          index_from: offset of the word numbers.

        Source: https://keras.io/api/datasets/reuters/.
        """
        arguments.require({"test_split": test_split}, "a number in [0, 1)", lambda share: 0 <= share < 1)
        path = path_of(path, "reuters.npz")
        texts, labels = npz_arrays(path, "x", "y")
        _check_texts(path, texts, labels)
        (texts, labels), _ = shuffled_split(texts, labels, 0, seed)
        kept, labels = _shorter(_begun(texts, start_char, index_from), labels, maxlen)
        kept = _with_rare_words(kept, num_words, skip_top, oov_char)
        count = int(len(kept) * (1 - test_split))
        return (_as_objects(kept[:count]), labels[:count]), (_as_objects(kept[count:]), labels[count:])

    @staticmethod
    def get_word_index(path: str | os.PathLike[str] = "reuters_word_index.json") -> dict[str, int]:
        """Returns the number of each word, to which `load_data` adds `index_from`.

        Args:
          path: name of the file in the cache folder, or the path of a copy.
        """
        return _word_index(path_of(path, "reuters_word_index.json"))

    @staticmethod
    def get_label_names() -> tuple[str, ...]:
        """Returns the names of the topics, in the order of their numbers.

        >>> reuters.get_label_names()[:3]
        ('cocoa', 'grain', 'veg-oil')
        """
        return tuple(_TOPICS.split())


def _check_texts(path: str, *texts_and_labels: np.ndarray) -> None:
    """Raises ValueError unless arrays are lists of word numbers, each with a label."""
    with naming_file(path):
        for texts, labels in zip(texts_and_labels[::2], texts_and_labels[1::2], strict=True):
            if labels.shape != (len(texts),) or not all(isinstance(text, list) for text in texts):
                raise ValueError("it does not have lists, each with a label")
            # A file can hold one long list many times.
            check_expansion(path, os.path.getsize(path), _WORD_BYTES * sum(map(len, texts)))
            if not all(set(map(type, text)) <= {int} for text in texts):
                raise ValueError("its texts are not lists of whole numbers")


def _begun(texts: Iterable[Any], start_char: int | None, index_from: int | None) -> list[list[int]]:
    """Returns texts with word numbers from `index_from` on, each after `start_char`."""
    shift, first = index_from or 0, [] if start_char is None else [start_char]
    return [first + [word + shift for word in text] for text in texts]


def _shorter(texts: list[list[int]], labels: np.ndarray, maxlen: int | None) -> tuple[list[list[int]], np.ndarray]:
    """Returns the texts of fewer than `maxlen` words and their labels; all if it is None."""
    if not maxlen:
        return texts, labels
    kept = [index for index, text in enumerate(texts) if len(text) < maxlen]
    if not kept:
        raise ValueError(f"`maxlen` must leave some texts, of fewer words than it says. Received: maxlen={maxlen}.")
    return [texts[index] for index in kept], np.asarray(labels)[kept]


def _with_rare_words(
    texts: list[list[int]], num_words: int | None, skip_top: int, oov_char: int | None
) -> list[list[int]]:
    """Returns texts whose words below `skip_top` or from `num_words` on are replaced by `oov_char`, or removed."""
    arguments.check_count("num_words", num_words, 1, optional=True)
    end = num_words or max(max(text, default=0) for text in texts)  # Keras leaves out the rarest word too
    if oov_char is None:
        return [[word for word in text if skip_top <= word < end] for text in texts]
    return [[word if skip_top <= word < end else oov_char for word in text] for text in texts]


def _as_objects(texts: list[list[int]]) -> np.ndarray:
    """Returns an array of lists."""
    made = np.empty(len(texts), object)
    made[:] = texts
    return made


def _word_index(path: str) -> dict[str, int]:
    """Returns the number of each word, from a file of JSON."""
    with naming_file(path):
        return {word: arguments.as_count(brief(word), number, 0) for word, number in read_json(path).items()}
