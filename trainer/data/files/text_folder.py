"""Texts from folders, with the arguments of Keras."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import brief, describe, wrong_type
from trainer.core.files import MOST_BYTES, read_at_most
from trainer.data.files.folder_dataset import FirstFile, folder_datasets
from trainer.data.files.folders import LabelledFiles, Labels, open_in_folder
from trainer.data.files.row_dataset import RowDataset
from trainer.data.sources.arrays import DataError


class _Texts:
    """Rows of texts, encoded or not, or of texts and labels, read on access."""

    def __init__(self, files: LabelledFiles, labels: np.ndarray | None, encode: Callable[[str], Any] | None,
                 shapes: FirstFile):
        self._files, self._labels, self._encode, self._shapes = files, labels, encode, shapes

    def __len__(self) -> int:
        return len(self._files.paths)

    def __getitem__(self, number: int) -> Any:
        path = self._files.paths[number]
        try:
            with open_in_folder(path, self._files.folder) as file:
                content = read_at_most(path, file, MOST_BYTES)
            text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig").read()  # with all ends of lines as one
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(
                f"The text {path!r} cannot be read: {brief(error)}. Delete it, or write it as UTF-8.") from error
        encoded = _as_text(text) if self._encode is None else self._encoded(path, text, self._encode)
        return encoded if self._labels is None else (encoded, self._labels[number])

    def _encoded(self, path: str, text: str, encode: Callable[[str], Any]) -> np.ndarray:
        try:
            encoded = np.asarray(encode(text))
        except Exception as error:
            raise DataError(f"`encode` failed for the text {path!r}: {type(error).__name__}: {error}.") from error
        if encoded.dtype.kind in "OSUmM":
            raise DataError("`encode` must return an array of numbers, such as the ids of words. Received: "
                            f"{describe(encoded)} for {path!r}.")
        first = self._shapes.differs(path, encoded.shape)
        if first is not None:
            raise DataError("`encode` must return arrays of one shape, such as ids padded to one length. Received: "
                            f"shape {encoded.shape} for {path!r}, and {first[1]} for {first[0]!r}.")
        return encoded


def _as_text(text: str) -> np.ndarray:
    """Returns an array of an object: an array of characters would give all texts of a batch the longest's size."""
    array = np.empty((), object)
    array[()] = text
    return array


@explains_arguments
def text_dataset_from_directory(
    directory: str | os.PathLike[str], encode: Callable[[str], Any] | None = None, labels: Labels = "inferred",
    label_mode: str | None = "int", class_names: Sequence[str] | None = None, batch_size: int | None = 32,
    shuffle: bool = True, seed: int | None = None, validation_split: float | None = None, subset: str | None = None,
    follow_links: bool = False, verbose: bool = True, *, num_threads: int | None = None,
) -> RowDataset | list[RowDataset]:
    """Returns the texts of a folder as batches, with Keras's labels, order and splits.

    Texts must become numbers before a step: by `encode`, such as a tokenizer that pads to a fixed length, or by `map`,
    such as an adapted `trainer.data.preprocessing.TextVectorization`.

    Args:
      directory: a folder with a subfolder for each class, which contains ".txt" files at any depth.
      encode: takes a text and returns an array, always of the same shape; called by several threads. None leaves text
        as it is, in arrays of str objects.
      labels, label_mode, class_names, batch_size, shuffle, seed, validation_split, subset, follow_links, verbose: as in
        `image_dataset_from_directory`.
      num_threads: number of reader threads; by default the number of processors.

    Raises:
      ValueError: if there is no such folder or no text in it, or arguments are unknown or contradict each other.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name, text in (("good", "fine"), ("bad", "poor")):
    ...     (folder / name).mkdir()
    ...     _ = (folder / name / "1.txt").write_text(text)
    >>> dataset = text_dataset_from_directory(folder, lambda text: [ord(letter) for letter in text], shuffle=False)
    Found 2 files belonging to 2 classes.
    >>> [(x.tolist(), y.tolist()) for x, y in dataset]
    [([[112, 111, 111, 114], [102, 105, 110, 101]], [0, 1])]

    Source: `keras.utils.text_dataset_from_directory`.
    """
    if encode is not None and not callable(encode):
        raise wrong_type("encode", encode, "a function that takes a text and returns an array, or None")
    shapes = FirstFile()  # shared by training and validation
    return folder_datasets(
        directory, (".txt",), lambda files, labels: _Texts(files, labels, encode, shapes),
        labels=labels, label_mode=label_mode, class_names=class_names, batch_size=batch_size, shuffle=shuffle,
        seed=seed, validation_split=validation_split, subset=subset, follow_links=follow_links, verbose=verbose,
        num_threads=num_threads)
