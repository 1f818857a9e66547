"""Which files of a folder are rows, and of which class: in the order, with the names and the splits of Keras."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainer.core.errors import unknown_name
from trainer.data.sources.arrays import DataError

LABEL_MODES = ("int", "categorical", "binary", None)
SUBSETS = ("training", "validation", "both")


@dataclasses.dataclass(frozen=True)
class LabelledFiles:
    """Files, the number of each one's class, and the names of all classes; the last two None without labels."""

    paths: list[str]
    labels: np.ndarray | None
    class_names: list[str] | None

    def part(self, rows: slice) -> LabelledFiles:
        """Returns some of the files."""
        return LabelledFiles(self.paths[rows], None if self.labels is None else self.labels[rows], self.class_names)


def list_files(
    directory: str | os.PathLike[str], labels: Any, suffixes: Sequence[str], class_names: Sequence[str] | None,
    shuffle: bool, seed: int, follow_links: bool,
) -> LabelledFiles:
    """Returns the files of a folder with some suffixes, and their classes.

    Args:
      directory: has a folder for each class, or files anywhere if labels are not inferred.
      labels: "inferred" from the names of folders; None; or a number for each file, in the order of their paths.
      suffixes: in lower case.
      class_names: the folders, in the order of the classes' numbers; by default all, by name.
      shuffle: whether to shuffle the files, as Keras does with this seed.
      seed: see above.
      follow_links: whether to enter folders that are links.

    Raises:
      DataError: there is no such folder, or no such file in it, or classes or labels do not fit.
    """
    directory = os.path.abspath(os.fspath(directory))
    if not os.path.isdir(directory):
        raise DataError(f"`directory` must be a folder. Received: {directory!r}, which "
                        f"{'is a file' if os.path.exists(directory) else 'does not exist'}.")
    if labels == "inferred":
        names = _class_folders(directory, class_names)
        found = [(path, number) for number, name in enumerate(names)
                 for path in _files(os.path.join(directory, name), suffixes, follow_links)]
        paths, numbers = [path for path, _ in found], np.array([number for _, number in found], np.int32)
    else:
        if class_names is not None:
            raise DataError("`class_names` can only be given with `labels=\"inferred\"`.")
        paths, numbers, names = list(_files(directory, suffixes, follow_links)), None, None
        if labels is not None:
            numbers = _given_labels(labels, paths, directory)
            names = [str(label) for label in sorted(set(labels))]
    if not paths:
        where = f"{directory!r}" + (" and the folders of its classes" if labels == "inferred" else "")
        raise DataError(f"There are no files in {where} that end with {', '.join(suffixes)}.")
    if shuffle:
        order = np.arange(len(paths))
        np.random.RandomState(seed).shuffle(order)  # which is Keras's order of this seed
        paths, numbers = [paths[row] for row in order], None if numbers is None else numbers[order]
    return LabelledFiles(paths, numbers, names)


def split(files: LabelledFiles, validation_split: float | None, subset: str | None) -> list[LabelledFiles]:
    """Returns the parts of files that were asked for: all, the first, the last or both of them."""
    if validation_split is None:
        return [files]
    count = int(validation_split * len(files.paths))
    border = len(files.paths) - count
    if count == 0 or border == 0:
        raise DataError(f"`validation_split={validation_split}` of {len(files.paths)} files leaves none for "
                        f"{'validation' if count == 0 else 'training'}.")
    parts = {"training": files.part(slice(border)), "validation": files.part(slice(border, None))}
    return list(parts.values()) if subset == "both" else [parts[str(subset)]]


def print_found(files: LabelledFiles, parts: list[LabelledFiles], subset: str | None) -> None:
    """Prints how many files and classes there are, and how many files are in the parts that were asked for."""
    classes = "" if files.class_names is None else f" belonging to {len(files.class_names)} classes"
    print(f"Found {len(files.paths)} files{classes}.")
    if subset is not None:
        print(f"Using {' and '.join(str(len(part.paths)) for part in parts)} files for "
              f"{'training and validation' if subset == 'both' else subset}.")


def check_split(validation_split: float | None, subset: str | None, shuffle: bool, seed: int | None) -> None:
    """Raises ValueError for arguments of a split that do not go together."""
    if (validation_split is None) != (subset is None):
        raise ValueError("`validation_split` and `subset` go together: pass both or neither. Received: "
                         f"validation_split={validation_split!r}, subset={subset!r}.")
    if validation_split is None:
        return
    if not 0 < validation_split < 1:
        raise ValueError(f"`validation_split` must be between 0 and 1. Received: {validation_split!r}.")
    if subset not in SUBSETS:
        raise unknown_name("subset", str(subset), SUBSETS)
    if shuffle and seed is None and subset != "both":
        raise ValueError("A shuffled split needs a `seed`, so that both calls shuffle alike and no file is in both "
                         "parts. Pass `seed=`, or `subset=\"both\"`.")


def encode_labels(files: LabelledFiles, label_mode: str | None) -> np.ndarray | None:
    """Returns the labels of files: int32 numbers, float32 one-hot vectors, or float32 0.0 and 1.0 of shape (1,)."""
    if label_mode not in LABEL_MODES:
        raise unknown_name("label_mode", str(label_mode), [str(mode) for mode in LABEL_MODES])
    if files.labels is None or label_mode is None:
        return None
    names = files.class_names or []
    if label_mode == "binary":
        if len(names) != 2:
            raise DataError(
                f"`label_mode=\"binary\"` needs two classes. Received: {len(names)}: {', '.join(names[:5])}.")
        return files.labels.astype(np.float32)[:, None]
    return files.labels if label_mode == "int" else np.eye(len(names), dtype=np.float32)[files.labels]


def _class_folders(directory: str, class_names: Sequence[str] | None) -> list[str]:
    folders = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(f"{directory!r} has no folders, one for each class. Pass `labels=None` for files without "
                        "labels, or a list of labels.")
    missing = [] if class_names is None else [name for name in class_names if name not in folders]
    if missing:
        raise DataError(f"`class_names` has {', '.join(map(repr, missing))}, and {directory!r} no such folder. It has: "
                        f"{', '.join(folders[:10])}.")
    return folders if class_names is None else list(class_names)


def _files(folder: str, suffixes: Sequence[str], follow_links: bool) -> Iterator[str]:
    """Yields the files of a folder and the folders in it, by path."""
    for root, _, names in sorted(os.walk(folder, followlinks=follow_links)):
        for name in sorted(names):
            if name.lower().endswith(tuple(suffixes)):
                yield os.path.join(root, name)


def _given_labels(labels: Any, paths: list[str], directory: str) -> np.ndarray:
    numbers = np.asarray(labels)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError("`labels` must be \"inferred\", None, or a list of whole numbers. Received: "
                        f"{numbers.dtype} of shape {numbers.shape}.")
    if len(numbers) != len(paths):
        raise DataError(f"`labels` has {len(numbers)} entries, and {directory!r} {len(paths)} files.")
    return numbers.astype(np.int32)
