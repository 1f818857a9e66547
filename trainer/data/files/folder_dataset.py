"""Common parts of folder datasets: checks of arguments, splits, shuffling and batches, as in Keras."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.data.files import folders
from trainer.data.files.folders import Labels
from trainer.data.files.row_dataset import RowDataset, Rows


class FirstFile:
    """Compares a property of files with the first file that was read; thread-safe.

    >>> first = FirstFile()
    >>> first.differs("a.txt", (3,)), first.differs("b.txt", (3,)), first.differs("c.txt", (4,))
    (None, None, ('a.txt', (3,)))
    """

    def __init__(self) -> None:
        self._first: tuple[str, Any] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return FirstFile, ()  # a copy has its own first file, and a lock cannot be pickled

    def differs(self, path: str, value: object) -> tuple[str, Any] | None:
        """Returns the first file and its value if this file's value differs; otherwise None."""
        with self._lock:
            first = self._first = self._first or (path, value)
        return None if first[1] == value else first


def folder_datasets(
    directory: str | os.PathLike[str], suffixes: Sequence[str],
    make_rows: Callable[[folders.LabelledFiles, np.ndarray | None], Rows], *,
    labels: Labels, label_mode: str | None, class_names: Sequence[str] | None, batch_size: int | None, shuffle: bool,
    seed: int | None, validation_split: float | None, subset: str | None, follow_links: bool, verbose: bool,
    num_threads: int | None, keep: Callable[[folders.LabelledFiles], folders.LabelledFiles] = lambda files: files,
) -> RowDataset | list[RowDataset]:
    """Returns the files of a folder as rows or batches; a list of two datasets for `subset="both"`.

    Args:
      directory: the folder.
      suffixes: suffixes of its files, in lower case.
      make_rows: takes files and encoded labels, and returns rows.
      labels, label_mode, class_names, batch_size, shuffle, seed, validation_split, subset, follow_links, verbose,
        num_threads: see `image_dataset_from_directory`.
      keep: takes all files, and returns the files to use.
    """
    arguments.require_bool(shuffle=shuffle, follow_links=follow_links)
    arguments.check_counts(1, optional=True, num_threads=num_threads, batch_size=batch_size)
    folders.check_split(validation_split, subset, shuffle, seed)
    seed = 0 if seed is None else arguments.as_seed("seed", seed)
    files = keep(folders.list_files(directory, None if label_mode is None else labels, suffixes, class_names, shuffle,
                                    seed, follow_links))
    parts = folders.split(files, validation_split, subset)
    if verbose:
        folders.print_found(files, parts, subset)
    datasets = []
    for number, part in enumerate(parts):
        rows = make_rows(part, folders.encode_labels(part, label_mode))
        dataset = RowDataset(rows, part.class_names, part.paths, num_threads)
        if shuffle and number == 0:
            dataset = dataset.shuffle(seed)
        datasets.append(dataset if batch_size is None else dataset.batch(batch_size))
    return datasets if subset == "both" else datasets[0]
