"""The JSON files of preprocessing layers."""

from __future__ import annotations

import os
from typing import Any

from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import brief, naming_file
from trainer.core.files import open_file, read_json, storage
from trainer.core.registry import Registry
from trainer.data.preprocessing.feature_space import FeatureSpace
from trainer.data.preprocessing.layer import FORMAT_VERSION, PreprocessingLayer
from trainer.data.preprocessing.registry import CLASSES

_ALL: Registry[PreprocessingLayer] = Registry(
    "preprocessing layer", PreprocessingLayer, "data.preprocessing",
    {cls.__name__: cls for cls in (*CLASSES, FeatureSpace)})


@explains_arguments
def load(filepath: str | os.PathLike[str], custom_objects: dict[str, Any] | None = None) -> PreprocessingLayer:
    """Returns a layer that `save` wrote, with its statistics and vocabulary.

    The file holds plain data: loading it runs no code.

    Args:
      filepath: path of the file.
      custom_objects: custom classes and functions that are not registered, by name.

    Raises:
      FileNotFoundError: if there is no such file.
      TypeError: if `filepath` is not a path.
      ValueError: if the file is damaged, does not hold a preprocessing layer, or has a newer format.

    Example:
      >>> import os, tempfile
      >>> from trainer.data import preprocessing
      >>> path = os.path.join(tempfile.mkdtemp(), "colors.json")
      >>> preprocessing.StringLookup(vocabulary=["red", "green"]).save(path)
      >>> preprocessing.load(path)(["green", "blue"]).tolist()
      [2, 0]
    """
    path = storage.as_place("filepath", filepath, "a path, such as 'preprocessing.json'")
    with open_file(path) as file:
        start = file.read(1)
    if start not in (b"{", b""):
        raise _no_layer(path)
    content = read_json(path)
    with naming_file(path):
        if not isinstance(content, dict) or not isinstance(content.get("layer"), dict):
            raise _no_layer(path)
        if content["format_version"] > FORMAT_VERSION:
            raise ValueError(f"{path!r} has version {brief(content['format_version'])} of the format of preprocessing "
                             f"layers. This trainer knows version {FORMAT_VERSION}. Install the version that wrote it.")
        return _ALL.deserialize(content["layer"], custom_objects)


def _no_layer(path: str) -> ValueError:
    return ValueError(f"{path!r} is no preprocessing layer, as `save` writes it. An exported model is loaded with "
                      "`trainer.load_exported`, a checkpoint with `trainer.load`, weights with a model's "
                      "`load_weights`.")
