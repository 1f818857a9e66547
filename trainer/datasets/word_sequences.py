"""Texts as lists of word numbers, prepared as Keras does.

Owns the numbers of the first words, of rare ones, and the lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.errors import naming_file


def begun(texts: Iterable[Any], start_char: int | None, index_from: int | None) -> list[list[int]]:
    """Returns texts with their words numbered from `index_from` on, each after `start_char`."""
    shift, first = index_from or 0, [] if start_char is None else [start_char]
    return [first + [word + shift for word in text] for text in texts]


def shorter(texts: list[list[int]], labels: np.ndarray, maxlen: int | None) -> tuple[list[list[int]], np.ndarray]:
    """Returns the texts of fewer than `maxlen` words and their labels; all where None.

    Raises:
      ValueError: if there is none.
    """
    if not maxlen:
        return texts, labels
    kept = [index for index, text in enumerate(texts) if len(text) < maxlen]
    if not kept:
        raise ValueError(f"`maxlen` must leave some texts, of fewer words than it says. Received: maxlen={maxlen}.")
    return [texts[index] for index in kept], np.asarray(labels)[kept]


def with_rare_words(texts: list[list[int]], num_words: int | None, skip_top: int,
                    oov_char: int | None) -> list[list[int]]:
    """Returns texts with `oov_char` in the place of words below `skip_top` or from `num_words` on; without them, where
    it is None."""
    arguments.check_count("num_words", num_words, 1, optional=True)
    end = num_words or max(max(text) for text in texts)  # Keras leaves out the rarest word too
    if oov_char is None:
        return [[word for word in text if skip_top <= word < end] for text in texts]
    return [[word if skip_top <= word < end else oov_char for word in text] for text in texts]


def as_objects(texts: list[list[int]]) -> np.ndarray:
    """Returns an array of lists."""
    made = np.empty(len(texts), object)
    made[:] = texts
    return made


def word_index(path: str) -> dict[str, int]:
    """Returns the number of each word, from a file of JSON."""
    with naming_file(path), open(path, encoding="utf-8") as file:
        return json.load(file)
