"""`python -m trainer inspect PATH`: the content of a file or folder of the trainer, and whether it is undamaged.

Owns the output for each kind. It needs no model, changes nothing, and runs no code from a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from trainer.core.errors import brief, naming_file
from trainer.core.files import open_file, parse_json, read_json, storage
from trainer.core.received_text import printable
from trainer.core.units import columns, readable_bytes

VERIFIED, DAMAGED, UNKNOWN, UNCHECKED = "verified", "damaged", "unknown", "no checksum"
IS_DAMAGED, REFUSED = 1, 2


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """An array of a file or folder.

    Attributes:
      name: its path, such as "params/Dense_0/kernel".
      dtype: the name of its dtype.
      nbytes: its size in bytes.
      state: "verified", "damaged", "unknown" in a damaged file with a single checksum for all of its arrays, or "no
        checksum" if none was saved with it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    state: str


@dataclasses.dataclass
class Inspection:
    """The content of a file or folder.

    Attributes:
      path: the file or folder.
      kind: its kind, such as "weights".
      arrays: its arrays, in the order of the file.
      step: number of updates of the state, if recorded.
      facts: further metadata, such as the version of the format.
      problems: descriptions of damage, a sentence each.
    """

    path: str
    kind: str
    arrays: list[ArrayRow] = dataclasses.field(default_factory=list)
    step: int | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(row.nbytes for row in self.arrays)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON data."""
        return {**dataclasses.asdict(self), "nbytes": self.nbytes, "whole": not self.problems}

    def __str__(self) -> str:
        lines = [f"{printable(self.path)}: {self.kind}"]
        facts = {**({} if self.step is None else {"step": self.step}), **self.facts}
        lines += [f"  {brief(name)}: {brief(value)}" for name, value in facts.items()]
        if self.arrays:
            table = columns([("Array", "Dtype", "Shape", "Bytes", ""),
                             *((brief(row.name), row.dtype, brief(row.shape), readable_bytes(row.nbytes), row.state)
                               for row in self.arrays)], right_aligned=(3,))
            rule = "-" * max(map(len, table))
            lines += [table[0], rule, *table[1:], rule, f"{len(self.arrays)} arrays, {readable_bytes(self.nbytes)}"]
        states = {row.state for row in self.arrays}
        if self.problems:
            lines += [f"DAMAGED: {problem}" for problem in self.problems]
        else:
            lines.append("No checksums were saved, so damage would not show." if UNCHECKED in states else
                         "All bytes have the checksums that were saved with them.")
        return "\n".join(lines)


def run(path: str, as_json: bool) -> int:
    """Prints the content of a path, and returns the exit code: 1 if damaged or of another kind, 2 if missing."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a training may be using the GPUs
    try:
        found = inspect(path)
    except (OSError, ValueError) as error:
        print(printable(str(error), newlines=True), file=sys.stderr)
        return REFUSED if isinstance(error, OSError) else IS_DAMAGED
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)
    return IS_DAMAGED if found.problems else 0


def inspect(path: str) -> Inspection:
    """Returns the content of a file or folder.

    Args:
      path: a file of weights, a training state, an exported model in any of its formats, a checkpoint, or a folder of
        checkpoints, of which the newest is inspected.

    Raises:
      FileNotFoundError: if there is no such path; the message lists similar names.
      ValueError: if it is of another kind.
    """
    from trainer.engine.saving.checkpoint import CheckpointFolder, is_checkpoint

    if not storage.is_folder(path):
        if path.endswith(".onnx") and storage.is_file(path):
            raise ValueError(f"{path!r} is an ONNX file, which Netron (https://netron.app) shows.")
        return _of_file(path)
    if is_checkpoint(path):
        return _of_checkpoint(path)
    folder = CheckpointFolder(path)
    steps = folder.steps()
    if steps:
        return _of_run(folder, steps)
    if storage.is_file(os.path.join(path, "saved_model.pb")):
        raise ValueError(f"{path!r} is a SavedModel of TensorFlow, which its own tool shows: `saved_model_cli show "
                         "--all --dir PATH`.")
    if storage.is_file(os.path.join(path, "signature.json")):
        return _of_stablehlo(path)
    raise ValueError(f"{path!r} is a folder without checkpoints or an exported model. Expected: a checkpoint, as "
                     "`Model.save` writes it, or the folder that was given to `BackupAndRestore`.")


# --- files -----------------------------------------------------------------------------------------------------------


def _of_file(path: str) -> Inspection:
    from trainer.engine.saving.arrays.file_kinds import open_arrays

    with open_arrays(path, "a safetensors file", "") as file:
        text_key = next((key for key in _texts() if key in file.metadata), None)
        if text_key is None:
            return _of_weights(path, file)
        return _of_file_with_text(path, file, text_key)


def _texts() -> dict[str, str]:
    """Returns the kinds of files that hold a text, by the key of the text."""
    from trainer.engine.model.core.saved_model import DOCUMENT_KEY
    from trainer.engine.saving.export import MANIFEST_KEY

    return {MANIFEST_KEY: "exported model", DOCUMENT_KEY: "training state, as `Model.save` writes it"}


def _of_weights(path: str, file: Any) -> Inspection:
    rows, problems = [], []
    for name, spec in file.shapes.items():
        state = VERIFIED if file.has_checksums else UNCHECKED
        try:
            file.verify(name)
        except ValueError as error:
            state = DAMAGED
            problems.append(str(error))
        rows.append(_row(name, spec, state))
    own = file.metadata.get("package") == "trainer-jax"
    kind = "weights, as `Model.save_weights` writes them" if own else "arrays of another program"
    facts = {f"metadata {key}": text for key, text in file.metadata.items()}
    return Inspection(path, kind, rows, facts=facts, problems=problems)


def _of_file_with_text(path: str, file: Any, key: str) -> Inspection:
    from trainer.engine.saving.arrays.file_kinds import is_whole

    whole = is_whole(file, key)
    problems = [] if whole else [f"{path!r} does not have the checksum that it was saved with. It is one checksum for "
                                 "the whole file, so any of its arrays may be what differs."]
    rows = [_row(name, spec, VERIFIED if whole else UNKNOWN) for name, spec in file.shapes.items()]
    found = Inspection(path, _texts()[key], rows, problems=problems)
    with naming_file(path) if whole else contextlib.suppress(
            ValueError, TypeError, LookupError, AttributeError, RecursionError):
        document = parse_json(file.metadata[key])
        # The plain values of a training state are tagged; see `core/plain.py`.
        tagged = document.get("dict", document)
        found.facts = {name: value for name, value in tagged.items()
                       if name in ("format_version", "jax", "optimizer")}
        if "inputs" in document and "outputs" in document:
            found.facts["batch_size"] = document["batch_size"] or "any"
            found.facts |= {name: _described(document[name]) for name in ("inputs", "outputs")}
        if "state/step" in file.shapes:
            found.step = int(file["state/step"])
    return found


def _described(described: Any) -> str:
    """Returns the text for an export's description of inputs or outputs."""
    if described is None:
        return "None"
    if "dict" in described:
        return "{" + ", ".join(f"{key}: {_described(value)}" for key, value in described["dict"].items()) + "}"
    for kind, ends in (("list", "[]"), ("tuple", "()")):
        if kind in described:
            return ends[0] + ", ".join(map(_described, described[kind])) + ends[1]
    return f"{described['dtype']}({', '.join('rows' if size is None else str(size) for size in described['shape'])})"


# --- folders ---------------------------------------------------------------------------------------------------------


def _of_run(folder: Any, steps: list[int]) -> Inspection:
    """Returns the content of the newest checkpoint of a run, and the list of the other checkpoints."""
    from trainer.engine.saving.checkpoint import damaged_files

    found = _of_checkpoint(folder.path_of(steps[-1]))
    others = []
    for step in steps[:-1]:
        path = folder.path_of(step)
        try:
            is_damaged = bool(damaged_files(path))
        except ValueError:
            is_damaged = True
        others.append(f"step_{step} ({DAMAGED if is_damaged else VERIFIED})")
        if is_damaged:
            found.problems.append(f"The older checkpoint {path!r} is damaged.")
    found.facts["older checkpoints"] = ", ".join(others) or "none"
    return found


def _of_stablehlo(path: str) -> Inspection:
    """Returns the content of an export in the format "stablehlo"."""
    from trainer.engine.saving.formats import SIGNATURE, WEIGHTS

    kind = "exported model, a StableHLO program"
    try:
        signature = read_json(os.path.join(path, SIGNATURE), path)
        facts = {name: signature[name] for name in ("format_version", "jax", "stablehlo", "platform")}
        facts["batch_size"] = signature["batch_size"] or "any"
        facts |= {name: _described(signature[name]) for name in ("inputs", "outputs")}
        problems = []
        for name, expected in signature["sha256"].items():
            if os.path.basename(name) != name:
                raise ValueError("it names a file outside of the export")
            with open_file(os.path.join(path, name), path) as program:
                if hashlib.file_digest(program, "sha256").hexdigest() != expected:
                    problems.append(f"{os.path.join(path, name)!r} has other bytes than were written.")
        weights = _of_file(os.path.join(path, WEIGHTS))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Inspection(path, kind, problems=[f"{type(error).__name__}: {brief(error)}"])
    return Inspection(path, kind, weights.arrays, facts=facts, problems=[*problems, *weights.problems])


def _of_checkpoint(path: str) -> Inspection:
    from trainer.engine.saving import checkpoint as checkpoints
    from trainer.engine.saving.checkpoint import array_shards, layout

    try:
        damages = checkpoints.damaged_files(path)
    except checkpoints.NewerFormatError:
        raise
    except checkpoints.CheckpointError as error:  # in the manifest, so nothing else can be verified
        return Inspection(path, "checkpoint", problems=[str(error)])
    problems = [str(error) for error in damages.values()]
    try:
        checkpoint = checkpoints.open_checkpoint(path, verify=False)
    except (ValueError, OSError) as error:
        files = checkpoints.data_folder(path)
        is_document, are_arrays = (os.path.join(files, name) in {os.path.join(path, each) for each in damages}
                                   for name in (layout.DOCUMENT, layout.DOCUMENT_ARRAYS))
        if is_document or not are_arrays:
            return Inspection(path, "checkpoint", problems=[*problems, *([] if problems else [str(error)])])
        with naming_file(path):
            content = read_json(os.path.join(files, layout.DOCUMENT), path)
            checkpoint = checkpoints.Checkpoint(  # its state's files may be whole
                path, None, layout.specs_from_json(content["arrays"]), content[layout.PROCESSES], files,
                bool(content.get(layout.ORBAX)))
    index: Mapping[str, list[Any]] = {}
    state_folder = os.path.join(checkpoint.folder, layout.STATE)
    try:
        index = {} if checkpoint.is_orbax else array_shards.read_index(state_folder, checkpoint.processes)
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        problems += [] if problems else [f"The index of {state_folder!r} cannot be read: {brief(error)}."]
    broken = {os.path.join(path, name) for name in damages}
    in_state = any(f"{layout.STATE}/" in name or name.startswith(f"{layout.ORBAX}/") for name in damages)

    def state_of(name: str) -> str:
        files = {part.path for part in index.get(name, ())}
        if not files:  # the index is damaged: all of the state's files count
            return DAMAGED if in_state else VERIFIED
        return DAMAGED if {os.path.abspath(file) for file in files} & {os.path.abspath(file) for file in broken} else (
            VERIFIED)

    rows = [_row(name, spec, state_of(name)) for name, spec in checkpoint.specs.items()]
    document = checkpoint.document if isinstance(checkpoint.document, dict) else {}
    kinds = {"run": "checkpoint of a run of `fit`", "training state": "training state, as `Model.save` writes it"}
    facts = {name: document[name] for name in ("format_version", "epoch", "epochs", "batch", "batches", "optimizer")
             if name in document}
    facts["files"] = f"of {checkpoint.processes} process{'' if checkpoint.processes == 1 else 'es'}"
    return Inspection(path, kinds.get(str(document.get("kind")), "checkpoint"), rows, _step(checkpoint, index, rows),
                      facts, problems)


def _step(checkpoint: Any, index: Mapping[str, list[Any]], rows: list[ArrayRow]) -> int | None:
    """Returns the number of updates of a checkpoint's state; None where it is damaged."""
    import jax

    from trainer.engine.saving.checkpoint import array_shards

    whole = [row.name for row in rows if row.state == VERIFIED and row.shape == ()]
    name = next((name for name in ("step", "state/step") if name in whole and name in index), None)
    if name is None:
        return None
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape, dtype = checkpoint.specs[name]
    with naming_file(checkpoint.path), array_shards.ShardFiles() as files:
        return int(array_shards.read_array(index[name], jax.ShapeDtypeStruct(shape, dtype, sharding=here), files))


def _row(name: str, spec: tuple[tuple[int, ...], Any], state: str) -> ArrayRow:
    shape, dtype = spec
    return ArrayRow(name, str(dtype), tuple(shape), math.prod(shape) * dtype.itemsize, state)
