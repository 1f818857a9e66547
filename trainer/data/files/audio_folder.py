"""Sounds from folders, with the arguments of Keras."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import brief
from trainer.data.files.folder_dataset import FirstFile, folder_datasets
from trainer.data.files.folders import LabelledFiles, Labels, open_in_folder
from trainer.data.files.row_dataset import RowDataset
from trainer.data.sources.arrays import DataError

SUFFIXES = (".wav",)
_MOST_BYTES = 2**30  # of a sound, which is decoded as a whole
_UNKNOWN_SIZE = 2**32 + 7  # size of a file that was written as a stream


class _Sounds:
    """Rows of sounds, or of sounds and labels, decoded on access."""

    def __init__(self, files: LabelledFiles, labels: np.ndarray | None, sampling_rate: int | None, length: int | None,
                 rates: FirstFile, shapes: FirstFile):
        self._files, self._labels, self._sampling_rate, self._length = files, labels, sampling_rate, length
        self._rates, self._shapes = rates, shapes

    def __len__(self) -> int:
        return len(self._files.paths)

    def __getitem__(self, number: int) -> Any:
        path = self._files.paths[number]
        rate, sound = _decoded(path, self._files.folder)
        if self._sampling_rate is not None:
            sound = _resampled(sound, rate, self._sampling_rate)
        else:
            first = self._rates.differs(path, rate)
            if first is not None:
                raise DataError(f"Sounds must have one sampling rate. Received: {rate} samples per second in {path!r}, "
                                f"and {first[1]} in {first[0]!r}. Pass `sampling_rate={first[1]}`.")
        if self._length is not None:
            sound = np.pad(sound[:self._length], ((0, max(0, self._length - len(sound))), (0, 0)))
        first = self._shapes.differs(path, sound.shape)
        if first is not None:
            length = max(len(sound), first[1][0])
            one_length = (f"one length: pass `output_sequence_length=`, such as {length}, which cuts longer sounds "
                          "and pads shorter sounds with silence")
            rule = one_length if sound.shape[1] == first[1][1] else "one number of channels: convert the files"
            raise DataError(f"Sounds must have {rule}. Received: the shape "
                            f"(samples, channels) = {sound.shape} of {path!r}, and {first[1]} of {first[0]!r}.")
        return sound if self._labels is None else (sound, self._labels[number])


@explains_arguments
def audio_dataset_from_directory(
    directory: str | os.PathLike[str], labels: Labels = "inferred", label_mode: str | None = "int",
    class_names: Sequence[str] | None = None, batch_size: int | None = 32, sampling_rate: int | None = None,
    output_sequence_length: int | None = None, ragged: bool = False, shuffle: bool = True, seed: int | None = None,
    validation_split: float | None = None, subset: str | None = None, follow_links: bool = False, verbose: bool = True,
    *, num_threads: int | None = None,
) -> RowDataset | list[RowDataset]:
    """Returns the sounds of a folder as batches for `fit`, with Keras's labels, order and splits.

    A sound is a float32 array of shape `(samples, channels)`; integer samples are scaled to values from -1 to 1. All
    sounds have the same shape, so that a step compiles once.

    Args:
      directory: a folder with a subfolder for each class, which contains ".wav" files at any depth.
      labels, label_mode, class_names, batch_size, shuffle, seed, validation_split, subset, follow_links, verbose: as in
        `image_dataset_from_directory`.
      sampling_rate: samples per second; other sounds are resampled, as by `scipy.signal.resample_poly`. None keeps the
        rate, which must be the same for all sounds.
      output_sequence_length: samples per sound, after resampling: longer sounds are cut at the end, and shorter sounds
        are padded with silence at the end. None keeps the length, which must be the same for all sounds. (Keras pads
        the sounds of a batch to the longest.)
      ragged: must be False: arrays have a single length.
      num_threads: number of reader threads; by default the number of processors.

    Raises:
      ValueError: if there is no such folder or no sound in it, or arguments are unknown or contradict each other; while
        reading, if a file is not a sound, or differs from the others.

    >>> import pathlib, tempfile
    >>> from scipy.io import wavfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name, value in (("low", 0), ("high", 2**14)):
    ...     (folder / name).mkdir()
    ...     wavfile.write(folder / name / "1.wav", 8000, np.full(3, value, np.int16))
    >>> dataset = audio_dataset_from_directory(folder, output_sequence_length=4, shuffle=False)
    Found 2 files belonging to 2 classes.
    >>> [(x[..., 0].tolist(), y.tolist()) for x, y in dataset]
    [([[0.5, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], [0, 1])]

    Source: `keras.utils.audio_dataset_from_directory`.
    """
    arguments.check_counts(1, optional=True, sampling_rate=sampling_rate, output_sequence_length=output_sequence_length)
    arguments.require_bool(ragged=ragged)
    if ragged:
        raise ValueError("`ragged=True` is for ragged tensors, which JAX has not. Pass `output_sequence_length=`, to "
                         "which sounds are cut or filled with silence.")
    first = FirstFile(), FirstFile()  # shared by training and validation
    return folder_datasets(
        directory, SUFFIXES,
        lambda files, labels: _Sounds(files, labels, sampling_rate, output_sequence_length, *first),
        labels=labels, label_mode=label_mode, class_names=class_names, batch_size=batch_size, shuffle=shuffle,
        seed=seed, validation_split=validation_split, subset=subset, follow_links=follow_links, verbose=verbose,
        num_threads=num_threads)


def _decoded(path: str, folder: str | None) -> tuple[int, np.ndarray]:
    """Returns the samples per second, and float32 values of shape (samples, channels); scales integers to -1 to 1."""
    from scipy.io import wavfile  # takes 0.1 s, so only on use

    try:
        with open_in_folder(path, folder) as file:
            _check_is_whole(file)
            rate, values = wavfile.read(file)
        if rate < 1:
            raise ValueError(f"it has {rate} samples per second")
    except DataError:
        raise
    except Exception as error:  # of any type: SciPy's reader fails in many ways
        reason = brief(str(error).rstrip("."))
        raise DataError(f"The sound {path!r} cannot be read: {type(error).__name__}: {reason}. Delete it, or write it "
                        "as WAV.") from error
    values = values[:, None] if values.ndim == 1 else values
    if values.dtype == np.uint8:
        return rate, (values.astype(np.float32) - 128) / 128
    if values.dtype.kind == "i":
        return rate, values.astype(np.float32) / -float(np.iinfo(values.dtype).min)
    return rate, values.astype(np.float32)


def _check_is_whole(file: Any) -> None:
    # For a truncated file, SciPy only warns, without its name.
    head = file.read(8)
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > _MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than {_MOST_BYTES:,}: cut it into parts")
    said = int.from_bytes(head[4:], "little") + 8
    if head[:4] == b"RIFF" and size < said != _UNKNOWN_SIZE:
        raise ValueError(f"it ends after {size} of {said} bytes")


def _resampled(sound: np.ndarray, rate: int, sampling_rate: int) -> np.ndarray:
    if rate == sampling_rate:
        return sound
    from scipy import signal

    return np.asarray(signal.resample_poly(sound, sampling_rate, rate), np.float32)
