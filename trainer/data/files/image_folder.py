"""Images from folders, with the arguments of Keras."""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.data.files import folders, resizing
from trainer.data.files.decoding import CHANNELS, SUFFIXES, TooManyPixelsError, decode_image, load_image, pillow
from trainer.data.files.folder_dataset import folder_datasets
from trainer.data.files.folders import Labels
from trainer.data.files.row_dataset import RowDataset
from trainer.data.sources.arrays import DataError

MAX_PIXELS = 2**27  # 134 megapixels: 1.6 GB as float32, more than cameras have


class _Images:
    """Rows of images, or of images and labels, decoded on access."""

    def __init__(self, files: folders.LabelledFiles, labels: np.ndarray | None, size: tuple[int, int],
                 color_mode: str, interpolation: str, fit: Any, max_pixels: int):
        self._files, self._labels, self._size, self._color_mode = files, labels, size, color_mode
        self._interpolation, self._fit, self._max_pixels = interpolation, fit, max_pixels

    def __len__(self) -> int:
        return len(self._files.paths)

    def __getitem__(self, number: int) -> Any:
        image = decode_image(self._files.paths[number], self._color_mode, self._max_pixels, self._files.folder)
        if self._fit is not None:
            image = self._fit(image, self._size)
        image = resizing.resize(image, self._size, self._interpolation)
        return image if self._labels is None else (image, self._labels[number])


@explains_arguments
def image_dataset_from_directory(
    directory: str | os.PathLike[str],
    labels: Labels = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    batch_size: int | None = 32,
    image_size: int | tuple[int, int] = (256, 256),
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    interpolation: str = "bilinear",
    follow_links: bool = False,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    verbose: bool = True,
    *,
    skip_unreadable: bool = False,
    max_pixels: int = MAX_PIXELS,
    num_threads: int | None = None,
) -> RowDataset | list[RowDataset]:
    """Returns the images of a folder as batches for `fit`, with Keras's arguments, files, order and splits.

    Threads decode and resize images while steps run, to float32 with values from 0 to 255 and the shape `(height,
    width, channels)`. Each epoch of `fit` has a new order; iteration, `evaluate` and `predict` always use the order of
    the first epoch. The rows, and the random numbers of `random_map`, are the same in every process and after any
    interruption.

    Args:
      directory: a folder with a subfolder for each class, which contains images at any depth: files with the suffix
        ".bmp", ".gif", ".jpeg", ".jpg" or ".png". Other files are ignored.
      labels: "inferred" from the names of folders; None for images without labels; or a class index for each file, in
        the order of their paths, with each index from 0 at least once.
      label_mode: "int" gives int32 indices, "categorical" one-hot vectors, "binary" 0.0 or 1.0 of shape (1,), and None
        no labels.
      class_names: the folders in the order of the class indices; by default all, sorted by name.
      color_mode: "rgb", "rgba" or "grayscale": 3, 4 or 1 channels.
      batch_size: rows per batch; None gives single rows, for a later `batch`.
      image_size: height and width of the images; a number for both.
      shuffle: whether to shuffle the files before the split, and the rows in each epoch.
      seed: seed of the order; by default 0, where Keras draws a random seed.
      validation_split: the fraction of the files, from 0 to 1, for validation, taken from the end.
      subset: the part to return: "training", "validation", or "both", a list of two.
      interpolation: the resizing method, as in `tf.image.resize` with float32 and without antialiasing: "bilinear",
        "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian" or "mitchellcubic".
      follow_links: whether to enter linked folders, and to read files that lie outside of the folder behind links,
        which are errors otherwise. A link to an enclosing folder is always an error.
      crop_to_aspect_ratio: whether to crop images to the target aspect ratio instead of distorting them.
      pad_to_aspect_ratio: whether to pad such images with black instead.
      verbose: whether to print the number of files and classes.
      skip_unreadable: whether to skip files that are not images, or have too many pixels, with a warning that counts
        them. This decodes all files once. By default, the first such file ends the training with an error that names
        it.
      max_pixels: images with more pixels are rejected before they are decoded. Pillow's own limit is ignored.
      num_threads: number of decoder threads; by default the number of processors.

    Returns:
      A `RowDataset`, which has `class_names` and `file_paths`, and `map` and `random_map` for augmentation; with
      `subset="both"`, a list of a training dataset and a validation dataset, which is not shuffled.

    Raises:
      ValueError: if there is no such folder or no image in it, or arguments are unknown or contradict each other.
      ImportError: if Pillow is not installed: `pip install 'trainer-jax[images]'`.

    Example:

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("cats", "dogs"):
    ...     (folder / name).mkdir()
    ...     Image.new("RGB", (40, 30), "red").save(folder / name / "1.png")
    >>> dataset = image_dataset_from_directory(folder, image_size=(16, 16), batch_size=2)
    Found 2 files belonging to 2 classes.
    >>> dataset.class_names, [(x.shape, y.dtype.name) for x, y in dataset]
    (['cats', 'dogs'], [((2, 16, 16, 3), 'int32')])

    Source: `keras.utils.image_dataset_from_directory`.
    """
    size = _size(image_size)
    arguments.check_word("color_mode", color_mode, CHANNELS)
    method = interpolation.lower() if isinstance(interpolation, str) else interpolation
    arguments.check_word("interpolation", method, resizing.INTERPOLATIONS)
    arguments.require_bool(skip_unreadable=skip_unreadable, crop_to_aspect_ratio=crop_to_aspect_ratio,
                           pad_to_aspect_ratio=pad_to_aspect_ratio)
    arguments.check_count("max_pixels", max_pixels)
    if crop_to_aspect_ratio and pad_to_aspect_ratio:
        raise ValueError("`crop_to_aspect_ratio` and `pad_to_aspect_ratio` cannot both be True.")
    pillow()  # fails here rather than in a reader thread
    fit = (resizing.crop_to_aspect_ratio if crop_to_aspect_ratio
           else resizing.pad_to_aspect_ratio if pad_to_aspect_ratio else None)
    return folder_datasets(
        directory, SUFFIXES, lambda files, labels: _Images(files, labels, size, color_mode, method, fit, max_pixels),
        labels=labels, label_mode=label_mode, class_names=class_names, batch_size=batch_size, shuffle=shuffle,
        seed=seed, validation_split=validation_split, subset=subset, follow_links=follow_links, verbose=verbose,
        num_threads=num_threads,
        keep=lambda files: _readable(files, color_mode, max_pixels) if skip_unreadable else files)


def _size(image_size: object) -> tuple[int, int]:
    sides = np.asarray(image_size)
    is_whole = np.issubdtype(sides.dtype, np.integer) and sides.shape in ((), (2,))
    if not is_whole:
        raise TypeError("`image_size` must be the height and the width of images, or one number for both, whole "
                        f"numbers of at least 1. Received: {image_size!r}.")
    if sides.min() < 1:
        raise ValueError(f"`image_size` must be at least 1 in height and width. Received: {image_size!r}.")
    height, width = np.broadcast_to(sides, 2).tolist()
    return height, width


def _readable(files: folders.LabelledFiles, color_mode: str, max_pixels: int) -> folders.LabelledFiles:
    """Returns the readable files, and warns of the others."""
    def problem(path: str) -> str | None:
        try:
            load_image(path, color_mode, max_pixels, files.folder)
        except TooManyPixelsError:
            return f"have more than max_pixels={max_pixels:,} pixels"
        except DataError:
            return "are not images that can be read"
        return None

    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(problem, files.paths))
    bad = collections.defaultdict(list)
    for path, found in zip(files.paths, problems, strict=True):
        if found is not None:
            bad[found].append(path)
    if not bad:
        return files
    left_out = sum(map(len, bad.values()))
    reasons = "; ".join(f"{len(paths)} {found}: {', '.join(map(repr, sorted(paths)[:3]))}"
                        f"{', ...' if len(paths) > 3 else ''}" for found, paths in sorted(bad.items()))
    if left_out == len(files.paths):
        raise DataError(f"None of the files can be used. {reasons}.")
    warnings.warn(f"{left_out} of {len(files.paths)} files are left out. {reasons}.", stacklevel=user_stacklevel())
    kept = np.array([found is None for found in problems])
    return files.part(kept)
