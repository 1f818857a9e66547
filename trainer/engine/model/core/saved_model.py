"""The training state of a model on disk: a checkpoint folder or a single file.

Owns the metadata saved with the arrays, from which a model without weights can be built.
`engine/loop/resumable_run.py` saves a run of `fit`, which contains a training state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from trainer.core import plain, tree_paths
from trainer.core.errors import brief, naming_file, see
from trainer.core.files import parse_json, storage
from trainer.core.precision import SkippedUpdates
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.core.updates.spikes import Spikes
from trainer.distribute.placement.placement import to_host
from trainer.engine.model.core.state_holder import INIT_ROWS, StateHolder, with_rules
from trainer.engine.saving.arrays.file_kinds import read_with_text, save_with_text
from trainer.engine.saving.arrays.safetensors_file import match_arrays
from trainer.engine.saving.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    is_checkpoint,
    open_checkpoint,
    orbax_arrays,
)
from trainer.optimizers.base import OptimizerState
from trainer.optimizers.named import optimizer_kinds

Restore = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]
Specs = Mapping[str, tuple[tuple[int, ...], Any]]

_KIND = "training state"
FORMAT_VERSION = 1  # of the meaning of the arrays and the document
DOCUMENT_KEY = "training_state"
_DOCUMENT_ARRAYS, _STATE_ARRAYS = "document/", "state/"


def save(path: str, state: TrainState, inputs: PyTree) -> None:
    """Writes a training state: to a single file if `path` has a suffix, else to a checkpoint folder.

    Args:
      path: the file or folder. An existing file or folder is replaced once the new version is complete.
      inputs: the input shapes for initialization, a tree of `jax.ShapeDtypeStruct`s.
    """
    if os.path.splitext(path)[1]:
        _save_file(path, *_contents(state, inputs))
        return
    with CheckpointWriter() as writer:
        begin_save(writer, path, state, inputs)


def begin_save(writer: CheckpointWriter, path: str, state: TrainState, inputs: PyTree, as_orbax: bool = False) -> None:
    """Starts writing a training state to a checkpoint folder; see `save` and `CheckpointWriter.save`."""
    writer.save(path, *_contents(state, inputs), replace=True, as_orbax=as_orbax)


def _contents(state: TrainState, inputs: PyTree) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Returns the arrays and the document to save."""
    # Arrays without rows, which only describe the inputs.
    no_rows = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), inputs)
    return tree_paths.named_leaves(state), {
        "kind": _KIND, "format_version": FORMAT_VERSION, "inputs": no_rows,
        "optimizer": optimizer_kinds(state.optimizer)}


def restore(path: str, holder: StateHolder) -> None:
    """Restores the training state that `save` wrote, and builds the model if needed. See `trainer.load`."""
    document, specs, read = _open_folder(path) if storage.is_folder(path) else _open_file(path)
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise ValueError(f"{path!r} is a checkpoint of a run of `fit`. Give the folder that it is in to "
                         "`BackupAndRestore`; what `Model.save` writes is loaded here.")
    with naming_file(path):
        if document["format_version"] > FORMAT_VERSION:
            raise ValueError(f"{path!r} has version {brief(document['format_version'])} of the format of training "
                             f"states. This trainer knows version {FORMAT_VERSION}. Install the version that wrote it.")
        inputs = jax.tree.map(lambda leaf: np.zeros((INIT_ROWS, *leaf.shape[1:]), leaf.dtype), document["inputs"])
        then = document["optimizer"]
    if not holder.is_built and inputs is None:
        raise ValueError(f"{path!r} is Orbax's checkpoint of another program, which does not say what the model's "
                         "inputs are. Call `model.build(sample)` before `load`.")
    if not holder.is_built:
        holder.build(inputs)
    state = holder.current
    now = optimizer_kinds(state.optimizer)
    if now is None and then is not None:
        raise ValueError(f"The model is not compiled, and {path!r} is a training state of the optimizer "
                         f"{brief(repr(then))}. Call `compile(...)` as when it was saved, before `load`. "
                         f"{see('not-compiled')}")
    if None not in (now, then) and now != then:
        raise ValueError(f"{path!r} is a training state of the optimizer {brief(repr(then))}. Received: {now!r}. Make "
                         "and compile the model as it was when it was saved, or save and load its weights alone.")
    saved = _with_counts_of(specs, state)
    try:
        loaded = tree_paths.with_leaves(saved, read(tree_paths.named_leaves(saved)))
        holder.load(with_rules(loaded, state.optimizer))
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nMake and compile the model as it was when it was saved.") from None


def _with_counts_of(specs: Specs, state: TrainState) -> TrainState:
    """Returns a state with the counts of skipped updates, and the last losses and norms, of a file.

    Callbacks add them in `fit`, so that a model which is made and compiled in the same way may lack them, or have more.
    """
    def adapted(path: str, opt_state: Any) -> Any:
        def there(field: str, kind: Any) -> Any:
            names = [f"{path}/{field}/{part}" for part in kind._fields]
            return kind(*(jax.ShapeDtypeStruct(*specs[name], sharding=state.step.sharding) for name in names)
                        ) if all(name in specs for name in names) else None

        if not isinstance(opt_state, OptimizerState):
            return opt_state
        return opt_state._replace(skipped=there("skipped", SkippedUpdates), spikes=there("spikes", Spikes))

    named = isinstance(state.opt_state, dict)
    return state.replace(opt_state={
        name: adapted(f"opt_state/{name}", part) for name, part in state.opt_state.items()
    } if named else adapted("opt_state", state.opt_state))


def _open_folder(path: str) -> tuple[Any, Specs, Restore]:
    if CheckpointFolder(path).steps():
        raise ValueError(f"{path!r} has the checkpoints of a run of `fit`. Give it to `BackupAndRestore`; what "
                         "`Model.save` writes is loaded here.")
    if not is_checkpoint(path):
        names = [name for name in storage.names(path) if name.isdecimal() and is_checkpoint(os.path.join(path, name))]
        if not names:
            found = None if storage.is_remote(path) else orbax_arrays.find(path)
            if found is None:
                raise ValueError(f"{path!r} is a folder, but no checkpoint as `Model.save` or Orbax writes it.")
            return _open_orbax(found)
        path = os.path.join(path, max(names, key=int))
    checkpoint = open_checkpoint(path)
    return checkpoint.document, checkpoint.specs, checkpoint.restore


def _open_orbax(path: str) -> tuple[Any, Specs, Restore]:
    """Opens a tree that another program wrote; it has the arrays of a training state, and no document."""
    tree = orbax_arrays.OrbaxTree(path)

    def restore(targets: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in targets.items() if leaf.size}
        if tree.specs != wanted:
            raise CheckpointError(f"The arrays in {path!r} do not match the model's training state. "
                                  f"{match_arrays(tree.specs, wanted)}\n`Model.load_weights` loads only weights.")
        read = tree.read({name: targets[name].sharding for name in wanted})
        return {name: read.get(name, leaf) for name, leaf in targets.items()}

    return {"kind": _KIND, "format_version": FORMAT_VERSION, "inputs": None, "optimizer": None}, tree.specs, restore


def _save_file(path: str, arrays: Mapping[str, jax.Array], document: object) -> None:
    every = {f"{_STATE_ARRAYS}{name}": to_host(leaf) for name, leaf in arrays.items()}
    if jax.process_index() != 0:
        return
    encoded, document_arrays = plain.encode(document)
    text = json.dumps(encoded)
    every |= {f"{_DOCUMENT_ARRAYS}{name}": array for name, array in document_arrays.items()}
    save_with_text(path, DOCUMENT_KEY, text, every)


def _open_file(path: str) -> tuple[Any, Specs, Restore]:
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

    with naming_file(path):
        specs = {name: (array.shape, array.dtype) for name, array in part(_STATE_ARRAYS).items()}
        return plain.decode(parse_json(text), part(_DOCUMENT_ARRAYS)), specs, restore
