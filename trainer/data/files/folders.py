"""The files of a folder and their classes, with Keras's order, names and splits."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.errors import brief, describe, unknown_name, wrong_type
from trainer.core.files import open_file
from trainer.data.sources.arrays import DataError

LABEL_MODES = ("int", "categorical", "binary", None)
SUBSETS = ("training", "validation", "both")
Labels: TypeAlias = str | Sequence[int] | np.ndarray | None


@dataclasses.dataclass(frozen=True)
class LabelledFiles:
    """Files of a folder.

    Attributes:
      paths: path of each file.
      labels: class index of each file; None without labels.
      class_names: names of all classes; None without labels.
      folder: folder that must contain the targets of links; None if links are followed.
    """

    paths: list[str]
    labels: np.ndarray | None
    class_names: list[str] | None
    folder: str | None

    def part(self, rows: slice | np.ndarray) -> LabelledFiles:
        """Returns some of the files."""
        return dataclasses.replace(self, paths=np.array(self.paths, object)[rows].tolist(),
                                   labels=None if self.labels is None else self.labels[rows])


def open_in_folder(path: str, folder: str | None) -> Any:
    """Opens a file of a dataset; see `open_file`.

    Raises:
      DataError: if it is a link out of the folder.
    """
    try:
        return open_file(path, folder)
    except ValueError as error:
        raise DataError(f"{error} Pass `follow_links=True` if you trust the folder.") from None


def list_files(
    directory: str | os.PathLike[str], labels: Labels, suffixes: Sequence[str], class_names: Sequence[str] | None,
    shuffle: bool, seed: int, follow_links: bool,
) -> LabelledFiles:
    """Returns the files of a folder with given suffixes, and their classes.

    Args:
      directory: a folder with a subfolder for each class, or with files anywhere if labels are not inferred.
      labels: "inferred" from the names of folders; None; or a class index for each file, in the order of their paths.
      suffixes: suffixes in lower case.
      class_names: the folders, in the order of the class indices; by default all, sorted by name.
      shuffle: whether to shuffle the files, as Keras does with this seed.
      follow_links: whether to enter linked folders, and to read files outside of the folder through links.

    Raises:
      DataError: if there is no such folder or no such file in it, or if classes or labels do not match.
    """
    directory = os.path.abspath(arguments.as_path("directory", directory, "the path of a folder"))
    if not os.path.isdir(directory):
        raise DataError(f"`directory` must be a folder. Received: {directory!r}, which "
                        f"{'is a file' if os.path.exists(directory) else 'does not exist'}.")
    is_inferred = isinstance(labels, str) and labels == "inferred"
    if is_inferred:
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
            names = [str(number) for number in range(numbers.max(initial=-1) + 1)]
    if not paths:
        where = f"{directory!r}" + (" and the folders of its classes" if is_inferred else "")
        raise DataError(f"There are no files in {where} that end with {', '.join(suffixes)}.")
    if shuffle:
        order = np.arange(len(paths))
        np.random.RandomState(seed).shuffle(order)  # Keras's order for this seed
        paths, numbers = [paths[row] for row in order], None if numbers is None else numbers[order]
    return LabelledFiles(paths, numbers, names, None if follow_links else directory)


def split(files: LabelledFiles, validation_split: float | None, subset: str | None) -> list[LabelledFiles]:
    """Returns the requested parts of files: all, the first, the last or both."""
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
    """Prints or logs the number of files and classes, and the number of files in the requested parts."""
    classes = "" if files.class_names is None else f" belonging to {len(files.class_names)} classes"
    print_message(f"Found {len(files.paths)} files{classes}.")
    if subset is not None:
        print_message(f"Using {' and '.join(str(len(part.paths)) for part in parts)} files for "
                      f"{'training and validation' if subset == 'both' else subset}.")


def check_split(validation_split: float | None, subset: str | None, shuffle: bool, seed: int | None) -> None:
    """Raises ValueError for contradictory arguments of a split."""
    if (validation_split is None) != (subset is None):
        raise ValueError("`validation_split` and `subset` go together: pass both or neither. Received: "
                         f"validation_split={validation_split!r}, subset={subset!r}.")
    if validation_split is None:
        return
    arguments.require({"validation_split": validation_split}, "a number between 0 and 1", lambda part: 0 < part < 1)
    if subset not in SUBSETS:
        raise unknown_name("subset", str(subset), SUBSETS)
    if shuffle and seed is None and subset != "both":
        raise ValueError("A shuffled split needs a `seed`, so that both calls give one order and no file is in both "
                         "parts. Pass `seed=`, or `subset=\"both\"`.")


def encode_labels(files: LabelledFiles, label_mode: str | None) -> np.ndarray | None:
    """Returns the labels of files: int32 indices, float32 one-hot vectors, or float32 0.0 and 1.0 of shape (1,)."""
    if label_mode not in LABEL_MODES:
        raise unknown_name("label_mode", str(label_mode), [str(mode) for mode in LABEL_MODES])
    if files.labels is None or label_mode is None:
        return None
    names = files.class_names or []
    if label_mode == "binary":
        if len(names) != 2:
            raise DataError(
                f"`label_mode=\"binary\"` needs two classes. Received: {len(names)}: "
                f"{', '.join(brief(repr(name)) for name in names[:5])}.")
        return files.labels.astype(np.float32)[:, None]
    return files.labels if label_mode == "int" else np.eye(len(names), dtype=np.float32)[files.labels]


def _class_folders(directory: str, class_names: Sequence[str] | None) -> list[str]:
    folders = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(f"{directory!r} has no folders, one for each class. Pass `labels=None` for files without "
                        "labels, or a list of labels.")
    if class_names is not None:
        _check_names(class_names)
    missing = [] if class_names is None else [name for name in class_names if name not in folders]
    if missing:
        raise DataError(f"`class_names` has {', '.join(map(repr, missing))}, and {directory!r} no such folder. It has: "
                        f"{', '.join(brief(repr(name)) for name in folders[:10])}.")
    return folders if class_names is None else list(class_names)


def _files(folder: str, suffixes: Sequence[str], follow_links: bool) -> Iterator[str]:
    """Yields the files of a folder and its subfolders, sorted by path."""
    for root, names in sorted(_walk(folder, follow_links)):
        for name in sorted(names):
            if name.lower().endswith(tuple(suffixes)):
                yield os.path.join(root, name)


def _walk(folder: str, follow_links: bool) -> Iterator[tuple[str, list[str]]]:
    """Yields folders and the names of their entries; raises DataError for a link to an enclosing folder."""
    around = {folder: {os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))}}
    for root, folders, names in os.walk(folder, followlinks=follow_links):
        for path in (os.path.join(root, name) for name in folders if follow_links):
            real = os.path.realpath(path)
            if real in around[root]:
                raise DataError(f"{path!r} leads through a link to a folder around it, {real!r}, so that its files "
                                "would be found again and again. Remove the link, or pass `follow_links=False`.")
            around[path] = around[root] | {real}
        yield root, names


def _check_names(class_names: object) -> None:
    if isinstance(class_names, str) or not isinstance(class_names, Sequence) or not all(
            isinstance(name, str) for name in class_names):
        raise wrong_type("class_names", class_names, "a list of the names of folders")
    repeated = [name for name, count in collections.Counter(class_names).items() if count > 1]
    if repeated or not class_names:
        raise ValueError("`class_names` must be the names of folders, each once. Received: "
                         f"{f'{repeated[0]!r} more than once' if repeated else 'none'}.")


def _given_labels(labels: Labels, paths: list[str], directory: str) -> np.ndarray:
    numbers = np.asarray(labels)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError("`labels` must be \"inferred\", None, or a list of whole numbers. Received: "
                        f"{repr(labels) if isinstance(labels, str) else describe(numbers)}.")
    if len(numbers) != len(paths):
        raise DataError(f"`labels` has {len(numbers)} entries, and {directory!r} {len(paths)} files.")
    classes = np.unique(numbers)
    if len(classes) and (classes[0] != 0 or classes[-1] != len(classes) - 1):
        raise DataError(f"`labels` must be the numbers of classes from 0, each at least once. Received: {len(classes)} "
                        f"numbers from {classes[0]} to {classes[-1]}. Renumber the classes: "
                        "`np.unique(labels, return_inverse=True)[1]`.")
    return numbers.astype(np.int32)
