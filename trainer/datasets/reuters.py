"""News of Reuters: 11,228 texts as word numbers, and which of 46 topics each is about."""

from __future__ import annotations

import os

from trainer.core import arguments
from trainer.datasets import word_sequences
from trainer.datasets.keras_files import Split, npz_arrays, path_of, shuffled_split

_SHA256 = "d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916"
_MD5_OF_WORDS = "4d44cc38712099c9e383dc6e5f11a921"
_TOPICS = """
    cocoa grain veg-oil earn acq wheat copper housing money-supply coffee sugar trade reserves ship cotton
    carcass crude nat-gas cpi money-fx interest gnp meal-feed alum oilseed gold tin strategic-metal livestock
    retail ipi iron-steel rubber heat jobs lei bop zinc orange pet-chem dlr gas silver wpi hog lead
"""


def load_data(
    path: str | os.PathLike[str] = "reuters.npz", num_words: int | None = None, skip_top: int = 0,
    maxlen: int | None = None, test_split: float = 0.2, seed: int = 113, start_char: int | None = 1,
    oov_char: int | None = 2, index_from: int | None = 3,
) -> Split:
    """Returns texts, arrays of lists, and the numbers of their topics, to train on and to test on.

    Args:
      path: the name of the file in the cache folder, or the path of a copy of it; see `mnist.load_data`.
      num_words: as of `imdb.load_data`; so are those that are not named here.
      skip_top: see `num_words`.
      maxlen: see `num_words`.
      test_split: the share of the texts to test on.
      seed: see `num_words`.
      start_char: see `num_words`.
      oov_char: see `num_words`.
      index_from: see `num_words`.

    Source: https://keras.io/api/datasets/reuters/.
    """
    arguments.require({"test_split": test_split}, "a number in [0, 1)", lambda share: 0 <= share < 1)
    texts, labels = npz_arrays(path_of(path, _SHA256, "reuters.npz"), "x", "y")
    (texts, labels), _ = shuffled_split(texts, labels, 0, seed)
    kept, labels = word_sequences.shorter(word_sequences.begun(texts, start_char, index_from), labels, maxlen)
    kept = word_sequences.with_rare_words(kept, num_words, skip_top, oov_char)
    count = int(len(kept) * (1 - test_split))
    return ((word_sequences.as_objects(kept[:count]), labels[:count]),
            (word_sequences.as_objects(kept[count:]), labels[count:]))


def get_word_index(path: str | os.PathLike[str] = "reuters_word_index.json") -> dict[str, int]:
    """Returns the number of each word, to which `load_data` adds `index_from`.

    Args:
      path: the name of the file in the cache folder, or the path of a copy of it.
    """
    return word_sequences.word_index(path_of(path, _MD5_OF_WORDS, "reuters_word_index.json"))


def get_label_names() -> tuple[str, ...]:
    """Returns the names of the topics, in the order of their numbers.

    >>> get_label_names()[:3]
    ('cocoa', 'grain', 'veg-oil')
    """
    return tuple(_TOPICS.split())
