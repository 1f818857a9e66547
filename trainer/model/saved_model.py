"""The training state of a model on the disk: a checkpoint folder, or one file.

Owns what is saved of a model besides its arrays, so that one that has no weights yet can be built for them. A run of
`fit`, of which that is a part, is saved in `training_run.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from trainer.core import tree_paths
from trainer.core.train_state import TrainState
from trainer.distribute.placement.placement import to_host
from trainer.model.built_model import INIT_ROWS, BuiltModel
from trainer.saving.arrays.file_kinds import checked_path, read_with_text, save_with_text
from trainer.saving.arrays.safetensors_file import match_arrays
from trainer.saving.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    is_checkpoint,
    open_checkpoint,
    plain,
)

M = TypeVar("M", bound=BuiltModel)
Restore = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]

_KIND = "training state"
FORMAT_VERSION = 1  # of what the arrays and the document mean
DOCUMENT_KEY = "training_state"
_DOCUMENT_ARRAYS, _STATE_ARRAYS = "document/", "state/"


def save(path: str, state: TrainState, inputs: Any) -> None:
    """Writes a training state: to one file if `path` has a suffix, else to a checkpoint folder.

    Args:
      path: the file or folder; one that is there is replaced, once the new one is complete.
      state: the state.
      inputs: the shapes of what the module was initialised on, a tree of `jax.ShapeDtypeStruct`s.
    """
    arrays = tree_paths.named_leaves(state)
    # Arrays without rows: they say what inputs are like, and no more.
    no_rows = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), inputs)
    document = {"kind": _KIND, "format_version": FORMAT_VERSION, "inputs": no_rows}
    if os.path.splitext(path)[1]:
        _save_file(path, arrays, document)
        return
    with CheckpointWriter() as writer:
        writer.save(path, arrays, document, replace=True)


def load(filepath: str | os.PathLike[str], model: M) -> M:
    """Brings a model to the training state that `Model.save` wrote: weights, optimizer, step and seed.

    Args:
      filepath: the file or the folder.
      model: a model of the same module, compiled in the same way. Its strategy may be another one. It need not be
        built.

    Returns:
      `model`.

    Raises:
      FileNotFoundError: if there is no such file or folder.
      ValueError: if it holds something else or is damaged, or is of another module or optimizer; the arrays that differ
        are listed.
      TypeError: if `filepath` is not a path, or `model` not a model.

    Example:
      >>> model.save("digits")  # doctest: +SKIP
      >>> model = trainer.load("digits", new_model())  # doctest: +SKIP
    """
    path = checked_path("filepath", filepath)
    if not isinstance(model, BuiltModel):
        raise TypeError("`model` must be a model that is made and compiled like the one that was saved. Received: a "
                        f"value of type {type(model).__name__}.")
    document, restore = _open_folder(path) if os.path.isdir(path) else _open_file(path)
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise ValueError(f"{path!r} is a checkpoint of a run of `fit`. Give the folder that it is in to "
                         "`BackupAndRestore`; what `Model.save` writes is loaded here.")
    if document["format_version"] > FORMAT_VERSION:
        raise ValueError(f"{path!r} has version {document['format_version']} of the format of training states. This "
                         f"trainer knows version {FORMAT_VERSION}. Install the one that wrote it.")
    if not model.built:
        model.build_on(jax.tree.map(lambda leaf: np.zeros((INIT_ROWS, *leaf.shape[1:]), leaf.dtype),
                                    document["inputs"]))
    state = model.current_state
    try:
        model.load_state(tree_paths.with_leaves(state, restore(tree_paths.named_leaves(state))))
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nMake and compile the model as it was when it was saved.") from None
    return model


def _open_folder(path: str) -> tuple[Any, Restore]:
    if CheckpointFolder(path).steps():
        raise ValueError(f"{path!r} has the checkpoints of a run of `fit`. Give it to `BackupAndRestore`; what "
                         "`Model.save` writes is loaded here.")
    if not is_checkpoint(path):
        raise ValueError(f"{path!r} is a folder, but no checkpoint as `Model.save` writes it.")
    checkpoint = open_checkpoint(path)
    return checkpoint.document, checkpoint.restore


def _save_file(path: str, arrays: Mapping[str, jax.Array], document: Any) -> None:
    every = {f"{_STATE_ARRAYS}{name}": to_host(leaf) for name, leaf in arrays.items()}
    if jax.process_index() != 0:
        return
    encoded, document_arrays = plain.encode(document)
    text = json.dumps(encoded)
    every |= {f"{_DOCUMENT_ARRAYS}{name}": array for name, array in document_arrays.items()}
    save_with_text(path, DOCUMENT_KEY, text, every)


def _open_file(path: str) -> tuple[Any, Restore]:
    text, arrays = read_with_text(
        path, DOCUMENT_KEY, "a training state, as `Model.save` writes it", "",
        "Weights alone are loaded with `Model.load_weights`, exported models with `trainer.load_exported`.")

    def part(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    def restore(targets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        found = part(_STATE_ARRAYS)
        there, wanted = ({name: (leaf.shape, leaf.dtype) for name, leaf in tree.items()} for tree in (found, targets))
        if there != wanted:
            raise CheckpointError(f"The arrays in {path!r} are not the model's. {match_arrays(there, wanted)}")
        return {name: jax.make_array_from_callback(leaf.shape, leaf.sharding, found[name].__getitem__)
                for name, leaf in targets.items()}

    return plain.decode(json.loads(text), part(_DOCUMENT_ARRAYS)), restore
