"""Safetensors files of other libraries: one file, or several with an index, as `transformers` writes them.

Owns the search for the files of a folder, and the errors about files of other formats. Arrays are read in parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.core.errors import brief, naming_file
from trainer.core.files import open_file, read_json

NAME = "model.safetensors"
INDEX_NAME = f"{NAME}.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """Opens a safetensors file with the `safetensors` library.

    Raises:
      ValueError: if it is a file of another format, or damaged.
      ImportError: if safetensors is not installed.
      OSError: if the file cannot be read.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("These weights need safetensors. Install it: pip install 'trainer-jax[images]'.") from error
    with open_file(path) as file:
        beginning = file.read(4)
    if beginning == b"\x89HDF" or path.endswith(".keras"):
        raise ValueError(f"{path!r} is a file of Keras, whose weights `models.load_keras_weights` loads.")
    if beginning.startswith((b"PK", b"\x80\x02")):
        raise ValueError(f"{path!r} is a pickle of `torch.save`, which is not read. Write its arrays, in torch: "
                         "`safetensors.torch.save_file(model.state_dict(), \"model.safetensors\")`.")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path!r} is no safetensors file, or is damaged: {brief(error)}. Download or copy it again.") from error


@dataclasses.dataclass(frozen=True)
class FileArray:
    """An array of a file, which is read in parts.

    Attributes:
      path: the file.
      name: name of the array.
      shape: its shape.
      code: its dtype by the format, such as "BF16".
    """

    path: str
    name: str
    shape: tuple[int, ...]
    code: str

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the array, in memory of its own."""
        with opened(self.path) as file:  # for this part: the pages of a file that stays open stay in memory
            part: np.ndarray = file.get_slice(self.name)[index]
        return part


def arrays_at(path: str) -> dict[str, FileArray]:
    """Returns the arrays of a safetensors file, or of all files of an index or a folder, by name.

    Args:
      path: a file, an index, or a folder with a file "model.safetensors" or its index.

    Raises:
      ValueError: if a file is not a safetensors file or is damaged, or if index and files disagree.
      FileNotFoundError: if there is no such file.
    """
    if os.path.isdir(path):
        path = _main_file(path)
    if not path.endswith(".json"):
        return {array.name: array for array in _arrays_of(path)}
    with naming_file(path):
        files = {str(name): str(file) for name, file in read_json(path)["weight_map"].items()}
    found: dict[str, FileArray] = {}
    for file in sorted(set(files.values())):
        if os.path.basename(file) != file:
            raise ValueError(f"{path!r} names the file {brief(repr(file))}, which is outside of its folder.")
        found |= {array.name: array for array in _arrays_of(os.path.join(os.path.dirname(path), file))
                  if files.get(array.name) == file}
    if lost := sorted(files.keys() - found.keys()):
        raise ValueError(f"{path!r} names {len(lost)} arrays that its files do not have, such as {brief(lost[0])}. "
                         "Download or copy the folder again.")
    return found


def weights_in(folder: str) -> list[str]:
    """Returns the names of the files of weights in a folder."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") or name == INDEX_NAME)


def _main_file(folder: str) -> str:
    for name in (NAME, INDEX_NAME):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    if any(os.path.exists(os.path.join(folder, name)) for name in _PICKLES):
        raise ValueError(f"{folder!r} has a pickle of `torch.save`, which is not read, and no {NAME!r}. Write one, in "
                         "transformers: `AutoModel.from_pretrained(folder).save_pretrained(other_folder)`, with the "
                         "class that its config.json names under \"architectures\".")
    raise FileNotFoundError(f"{folder!r} has neither {NAME!r} nor {INDEX_NAME!r}.")


def _arrays_of(path: str) -> list[FileArray]:
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is not a mapping
        return [FileArray(path, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]
