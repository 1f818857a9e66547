"""Event files for TensorBoard.

Owns the form of an event: scalars, histograms, images and texts as TensorFlow 2 writes them, so that readers of Keras's
files can read them. Knows nothing of training. The import needs tensorboardX, which writes the records; Pillow encodes
images.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.core.files import open_log, storage


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


with _unchanged_environment():  # importing it sets a variable that only its own import reads
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboardX.record_writer import directory_check, register_writer_factory

BUCKETS = 30  # of a histogram, TensorFlow's default
MAX_IMAGES = 3  # of one summary, TensorFlow's default
FLUSH_SECS = 30.0

_DT_FLOAT, _DT_DOUBLE, _DT_STRING = 1, 2, 7  # TensorFlow's numbers for dtypes

_STORE = "trainer"  # the prefix of paths in object stores, which tensorboardX opens by `_Stores`

# Without this, two files of the same second would have the same name, and the later would replace the earlier.
_file_numbers = itertools.count()


class EventFile:
    """A new event file in a directory, which TensorBoard shows as a run.

    Events reach the disk after `flush`, or `FLUSH_SECS` after the last time. The file is closed when the object is
    deleted, and at the end of the program.

    Args:
      directory: path of the directory, created if missing, or its URL in an object store, to which each flush writes
        all events.

    Raises:
      OSError: if the file cannot be written.

    Example:

    >>> import pathlib, tempfile
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> file = EventFile(str(directory))
    >>> file.add_scalar("epoch_loss", 0.5, step=0)
    >>> file.close()
    >>> len(list(directory.glob("events.out.tfevents.*")))
    1
    """

    def __init__(self, directory: str):
        if storage.is_remote(directory):
            directory = f"{_STORE}:{directory}"
        directory_check(directory)
        suffix = f".{os.getpid()}.{next(_file_numbers)}.v2"
        self._writer = EventsWriter(os.path.join(directory, "events"), suffix)
        self._finalizer = weakref.finalize(self, self._writer.close)
        self._flush_due = time.monotonic() + FLUSH_SECS

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Adds a number."""
        self._add(tag, step, "scalars", TensorProto(dtype=_DT_FLOAT, tensor_shape=_shape(()), float_val=[value]))

    def add_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        """Adds a histogram of the finite values, with `BUCKETS` intervals of equal width."""
        buckets = histogram_buckets(values)
        self._add(tag, step, "histograms", TensorProto(
            dtype=_DT_DOUBLE, tensor_shape=_shape(buckets.shape), tensor_content=buckets.astype("<f8").tobytes()))

    def add_images(self, tag: str, images: np.ndarray, step: int) -> None:
        """Adds the first `MAX_IMAGES` images.

        Args:
          tag: name of the images.
          images: numbers of shape (images, height, width, channels), with 1, 3 or 4 channels. 0 is dark and 1 is
            bright; other values are clipped.
          step: position on the time axis.
        """
        pixels = np.clip(np.nan_to_num(images[:MAX_IMAGES].astype(np.float32)) * 255.5, 0, 255).astype(np.uint8)
        strings = [str(images.shape[2]).encode(), str(images.shape[1]).encode(), *map(png, pixels)]
        self._add(tag, step, "images", _strings(strings, (len(strings),)))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Adds a text, which TensorBoard renders as Markdown."""
        self._add(tag, step, "text", _strings([text.encode()], ()))

    def add_restart(self, step: int) -> None:
        """Makes TensorBoard ignore the data of the directory's earlier files from that step on."""
        self._writer.write_event(
            Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def flush(self) -> None:
        """Writes all events to the disk."""
        self._writer.flush()
        self._flush_due = time.monotonic() + FLUSH_SECS

    def close(self) -> None:
        """Writes the remaining events and closes the file; does nothing if it is closed."""
        self._finalizer()

    def _add(self, tag: str, step: int, plugin: str, tensor: Any) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
        summary = Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() >= self._flush_due:
            self.flush()


class _Stores:
    """Opens files in object stores for tensorboardX."""

    def directory_check(self, path: str) -> None:
        """Does nothing: a store has no folders."""

    def open(self, path: str) -> _Appended:
        return _Appended(path.removeprefix(f"{_STORE}:"))


class _Appended:
    """A log in a store, with the methods that tensorboardX calls: it takes `fileno` for a file on the disk."""

    def __init__(self, path: str):
        log = open_log(path)
        self.write, self.flush, self.close = log.write, log.flush, log.close


register_writer_factory(_STORE, _Stores())


def histogram_buckets(values: np.ndarray) -> np.ndarray:
    """Returns a row (left edge, right edge, count) for each of `BUCKETS` intervals between minimum and maximum.

    Equal values are all counted in the last interval, as in TensorFlow; without finite values all rows are zero.

    Args:
      values: real numbers of any shape and dtype.

    Returns:
      A float64 array of shape `(BUCKETS, 3)`.

    >>> histogram_buckets(np.array([1.0, 2.0, 2.0]))[[0, -1]].round(3).tolist()
    [[1.0, 1.033, 1.0], [1.967, 2.0, 2.0]]
    """
    flat = np.asarray(values).astype(np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    if flat.size == 0:
        return np.zeros((BUCKETS, 3))
    least, greatest = flat.min(), flat.max()
    width = (greatest - least) / BUCKETS
    if width == 0:
        counts = np.zeros(BUCKETS)
        counts[-1] = flat.size
        return np.stack([np.full(BUCKETS, least), np.full(BUCKETS, least), counts], axis=1)
    indices = np.minimum(np.floor((flat - least) / width), BUCKETS - 1).astype(np.int64)
    edges = np.linspace(least, greatest, BUCKETS + 1)
    return np.stack([edges[:-1], edges[1:], np.bincount(indices, minlength=BUCKETS)], axis=1)


def png(pixels: np.ndarray) -> bytes:
    """Returns an image as a PNG file.

    Args:
      pixels: uint8 array of shape (height, width, channels), with 1, 3 or 4 channels: grey, RGB or RGBA.
    """
    from PIL import Image  # only for `write_images`

    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def _shape(shape: tuple[int, ...]) -> Any:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])


def _strings(strings: list[bytes], shape: tuple[int, ...]) -> Any:
    return TensorProto(dtype=_DT_STRING, tensor_shape=_shape(shape), string_val=strings)
