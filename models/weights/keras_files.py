"""Keras weight files, read as a list of layers.

Owns the file formats. Reading executes nothing and does not follow links out of the file. Arrays are loaded lazily.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import zipfile
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from trainer.core.errors import brief, naming_file
from trainer.core.files import open_file, read_member

_GENERATORS = "seed_generator"  # dropout state, not a weight
_OPTIMIZER = "optimizer"  # stored beside the layers of a compiled model
_MEMBER = "model.weights.h5"  # inside a `.keras` archive
_ZIP = b"PK"
_CHUNK_VALUES = 2**20  # of an array that may grow


@dataclasses.dataclass(frozen=True)
class KerasLayer:
    """A layer with arrays in a weight file.

    Attributes:
      name: name of the layer.
      part: path of the layer's model inside the file; "" for the outermost model.
      arrays: arrays in the file, in Keras's order; `read` loads an array.
    """

    name: str
    part: str
    arrays: list[Any]


@contextlib.contextmanager
def keras_layers(path: str, most_bytes: int) -> Iterator[list[KerasLayer]]:
    """Yields the layers of a file and keeps the file open in the meantime.

    Args:
      path: a `.weights.h5` file, an `.h5` file of `model.save` or of the published weights, or a `.keras` archive.
      most_bytes: maximum unpacked size of the weights in an archive, in bytes.

    Raises:
      ImportError: if h5py is not installed.
      ValueError: if the file is damaged, has another format, or links to other files.
      OSError: if the file cannot be read.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError("Keras's weights need h5py. Install it: pip install 'trainer-jax[images]'.") from error
    with open_file(path) as opened:
        _check_is_of_keras(path, opened.read(9))
        source: Any = opened
        if zipfile.is_zipfile(opened):
            with naming_file(path):
                source = _unpacked(path, opened, most_bytes)
        opened.seek(0)
        try:
            file = h5py.File(source, "r")
        except OSError as error:
            raise ValueError(
                f"{path!r} is no HDF5 file, or is truncated: {brief(error)}. Download or copy it again.") from error
        with file:
            try:
                with naming_file(path):
                    layers = _legacy_layers(file) if _is_legacy(file) else list(_walk(file, "", set()))
            except (RuntimeError, OSError) as error:
                raise ValueError(
                    f"{path!r} is damaged, or no file of Keras's weights: {brief(repr(error))}.") from error
            if not layers:
                received = ", ".join(brief(repr(name)) for name in itertools.islice(file, 5)) or "an empty file"
                raise ValueError(f"{path!r} has no layers with weights. Expected: a file of `model.save_weights` or "
                                 f"`model.save` of Keras. Received: {received}.")
            yield layers


def read(array: Any) -> np.ndarray:
    """Loads an array of a `KerasLayer`."""
    if array.dtype.kind not in "biufV" or array.dtype.names is not None:
        raise ValueError(f"The array {brief(repr(array.name))} holds {brief(array.dtype)}, no numbers.")
    if array.chunks and math.prod(array.chunks) > max(array.size, _CHUNK_VALUES):  # each is unpacked as a whole
        raise ValueError(f"The array {brief(repr(array.name))} has {array.size:,} values, in chunks of "
                         f"{math.prod(array.chunks):,}.")
    return np.array(array, jnp.bfloat16 if array.attrs.get("dtype") == "bfloat16" else None)


def _check_is_of_keras(path: str, beginning: bytes) -> None:
    """Raises ValueError for a safetensors file or a truncated archive."""
    if beginning[8:] == b"{":  # safetensors: JSON after the length of the header
        raise ValueError(f"{path!r} is a safetensors file. Load weights of torchvision and timm with "
                         "`models.load_torch_weights`, and files of `Model.save_weights` with `model.load_weights`.")
    if beginning.startswith(_ZIP) and not zipfile.is_zipfile(path):
        raise ValueError(f"{path!r} is a truncated archive. Download or copy it again.")


def _unpacked(path: str, opened: Any, most_bytes: int) -> io.BytesIO:
    try:
        with zipfile.ZipFile(opened) as archive:
            if _MEMBER not in archive.namelist():
                raise ValueError(f"{path!r} is an archive without {_MEMBER!r}: no `.keras` file of Keras 3.")
            size = archive.getinfo(_MEMBER).file_size
            if size > most_bytes:
                raise ValueError(f"{path!r} holds {size:,} bytes of weights, and the model has room for "
                                 f"{most_bytes:,} at most: it is of another model.")
            return io.BytesIO(read_member(path, archive, _MEMBER, size))
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path!r} is damaged: {brief(error)}. Download or copy it again.") from error


def _is_legacy(file: Any) -> bool:
    return "layer_names" in file.attrs or "model_weights" in file


def _legacy_layers(file: Any) -> list[KerasLayer]:
    """Returns the layers of the format of Keras 1 and 2, with names in attributes, split if the list is long."""
    root = _member(file, "model_weights") if "model_weights" in file else file
    layers = []
    for name in _names(root, "layer_names"):
        group = _member(root, name)
        parts: dict[str, list[Any]] = {}
        for weight in _names(group, "weight_names"):
            parts.setdefault(weight.rpartition("/")[0], []).append(_array(group, weight))
        if len(parts) == 1:  # the weights may carry the name of another layer
            layers.append(KerasLayer(name.replace("/", "_"), "", *parts.values()))  # as renamed in Keras 3
        else:  # a nested model, such as a `Sequential`
            layers += [KerasLayer(part.rpartition("/")[2], name, arrays) for part, arrays in parts.items()]
    return layers


def _names(group: Any, attribute: str) -> list[str]:
    parts = [group.attrs[attribute]] if attribute in group.attrs else [
        group.attrs[f"{attribute}{part}"] for part in range(len(group.attrs)) if f"{attribute}{part}" in group.attrs]
    return [name.decode() if isinstance(name, bytes) else str(name) for part in parts for name in part]


def _walk(group: Any, group_name: str, seen: set[tuple[int, int]]) -> Iterator[KerasLayer]:
    """Yields the layers of the format of Keras 3: a group "vars" per layer, nested in groups named by class."""
    import h5py

    place = h5py.h5o.get_info(group.id)
    if (place.fileno, place.addr) in seen:  # by hard links, of which a few make a file without an end
        raise ValueError(f"The file has the group {brief(repr(group.name))} more than once.")
    seen.add((place.fileno, place.addr))
    for name in group:
        if name == _OPTIMIZER and "layers" in group:
            continue
        child = _member(group, name)
        if name == "vars" and hasattr(child, "keys"):
            arrays = [_array(child, number) for number in sorted(child, key=int)]
            if arrays and group_name != _GENERATORS:
                if "name" not in child.attrs:
                    raise ValueError("The file keeps no names of layers, as files of older versions of Keras. Load it "
                                     "in Keras 3, into the model that it was saved from, and save it again.")
                yield KerasLayer(str(child.attrs["name"]), group.name.rpartition("/layers/")[0], arrays)
        elif hasattr(child, "keys"):
            yield from _walk(child, name, seen)


def _array(group: Any, name: str) -> Any:
    array = _member(group, name)
    if not hasattr(array, "shape"):
        raise ValueError(f"The file has a group at {brief(repr(name))}, where an array belongs.")
    return array


def _member(group: Any, name: str) -> Any:
    """Returns a member of a group, after checking that it is stored in the same file."""
    import h5py

    for part in name.strip("/").split("/"):
        link = group.get(part, getlink=True)
        if not isinstance(link, h5py.HardLink):
            what = "no member" if link is None else "a link out of it"
            raise ValueError(f"The file has {what} at {brief(repr(name))}. It is damaged, or was made to read other "
                             "files.")
        group = group[part]
    if isinstance(group, h5py.Dataset) and (group.external or group.is_virtual):
        raise ValueError(f"The array {brief(repr(name))} of the file lies in other files, which are not read.")
    return group
