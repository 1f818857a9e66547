"""Reviews of films: 50,000 texts as word numbers, and whether each is positive."""

from __future__ import annotations

import os

import numpy as np

from trainer.core import arguments
from trainer.datasets import word_sequences
from trainer.datasets.keras_files import Split, npz_arrays, path_of, shuffled

_SHA256 = "69664113be75683a8fe16e3ed0ab59fda8886cb3cd7ada244f7d9544e4676b9f"
_MD5_OF_WORDS = "bfafd718b763782e994055a2d397834f"


def load_data(
    path: str | os.PathLike[str] = "imdb.npz", num_words: int | None = None, skip_top: int = 0,
    maxlen: int | None = None, seed: int = 113, start_char: int | None = 1, oov_char: int | None = 2,
    index_from: int | None = 3,
) -> Split:
    """Returns 25,000 texts to train on and 25,000 to test on, arrays of lists, and labels of 0 and 1.

    Words are numbered by how often they occur. `trainer.utils.pad_sequences` makes arrays of the lists.

    Args:
      path: the name of the file in the cache folder, or the path of a copy of it; see `mnist.load_data`.
      num_words: how many of the most frequent words are kept; all where None.
      skip_top: how many of the most frequent words are left out.
      maxlen: texts of as many words or more are left out.
      seed: of the order.
      start_char: the number that each text begins with; None for none.
      oov_char: the number in the place of words that are left out; None to leave them out altogether.
      index_from: what is added to the numbers of words.

    Raises:
      ValueError: if no text is left, or the file holds anything but numbers. Nothing in it is executed.

    Source: https://keras.io/api/datasets/imdb/.
    """
    found = npz_arrays(path_of(path, _SHA256, "imdb.npz"), "x_train", "y_train", "x_test", "y_test")
    random, parts = np.random.RandomState(arguments.as_seed("seed", seed)), []
    for texts, labels in (found[:2], found[2:]):
        order = shuffled(len(texts), random)
        parts.append(word_sequences.shorter(
            word_sequences.begun(texts[order], start_char, index_from), labels[order], maxlen))
    (train, train_labels), (test, test_labels) = parts
    kept = word_sequences.with_rare_words(train + test, num_words, skip_top, oov_char)
    count = len(train)
    return ((word_sequences.as_objects(kept[:count]), train_labels),
            (word_sequences.as_objects(kept[count:]), test_labels))


def get_word_index(path: str | os.PathLike[str] = "imdb_word_index.json") -> dict[str, int]:
    """Returns the number of each word, to which `load_data` adds `index_from`.

    Args:
      path: the name of the file in the cache folder, or the path of a copy of it.
    """
    return word_sequences.word_index(path_of(path, _MD5_OF_WORDS, "imdb_word_index.json"))
