"""A model's predictions as a single file, which can be used without the model's code.

Owns the format of that file: safetensors with the weights by path and a `jax.export` program that takes them, whose
metadata hold a manifest and a checksum. It sees a model only as a predict step and a state. Loading runs no Python from
a file and unpickles nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from trainer.core import arguments, errors
from trainer.core.calls.entry_points import entry_point, explains_arguments
from trainer.core.compile.jit import compiled
from trainer.core.files import parse_json, storage
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data.sources.arrays import as_arrays, is_leaf
from trainer.engine.saving.arrays.file_kinds import checked_path, read_with_text, save_with_text
from trainer.engine.saving.arrays.safetensors_file import match_arrays
from trainer.engine.saving.prediction import (
    DEFAULT_BATCH_SIZE,
    any_rows,
    describe_tree,
    exported_program,
    leaf_names,
    prediction_of,
    tree_of,
)

PACKAGE = "trainer-jax"
MANIFEST_KEY = "exported_model"
FORMAT_VERSION = 1
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_PROGRAM = "program"
SIGNATURE, SAVED_MODEL = "signature.json", "saved_model.pb"  # which tell the folders of other formats; see `formats.py`


def save(path: str, predict_step: Callable[[TrainState, Any], Any], state: TrainState, inputs: PyTree,
         batch_size: int | None, platforms: Sequence[str] | None) -> None:
    """Writes the computation of a predict step with a state, as a program for one device; see `Model.export`.

    Args:
      path: path of the file.
      predict_step: pure function from the state and a batch to outputs.
      state: state for the predict step; the optimizer and its state are not used.
      inputs: some rows of `x`, or their shapes.
      batch_size: rows of each batch; None for any number.
      platforms: platforms of the program; None for JAX's current platform and "cpu".
    """
    _check_can_serialize()
    platforms = checked_platforms(platforms)
    manifest = {"package": PACKAGE, "format_version": FORMAT_VERSION, "jax": jax.__version__,
                "batch_size": batch_size, "inputs": describe_tree(inputs, "x")}
    prediction = prediction_of(predict_step, state, inputs, batch_size, ", ".join(platforms))
    program = exported_program(prediction, batch_size, platforms).serialize()
    manifest |= {"outputs": describe_tree(prediction.outputs, "outputs"), "weights": list(prediction.weights)}
    arrays = prediction.host_weights()
    arrays[_PROGRAM] = np.frombuffer(program, np.uint8)
    text = json.dumps(manifest)
    if jax.process_index() == 0:
        save_with_text(path, MANIFEST_KEY, text, arrays)


@explains_arguments
def load_exported(filepath: str | os.PathLike[str]) -> ExportedModel:
    """Loads a model that `Model.export` wrote. The model's code is not needed.

    The whole file is first verified with its checksum. Its program can only compute, but it is compiled and run: load
    only trusted files.

    Args:
      filepath: path of the file.

    Returns:
      The model's predictions as a function.

    Raises:
      FileNotFoundError: if there is no such file; the message lists similar names.
      ValueError: if the file is of another kind, is damaged, has a newer format, or was not exported for this machine's
        platforms.
      ImportError: if the package `flatbuffers` is not installed.

    Example:
      >>> import trainer
      >>> from flax import linen as nn
      >>> model = trainer.Model(nn.Dense(2))
      >>> model.build(np.ones((1, 3)))
      >>> model.export("dense.export")
      >>> exported = load_exported("dense.export")
      >>> exported(np.ones((5, 3))).shape, exported.input_spec
      ((5, 2), ShapeDtypeStruct(shape=(rows, 3), dtype=float32))
    """
    path = checked_path("filepath", filepath)
    for name, kind in ((SIGNATURE, "StableHLO"), (SAVED_MODEL, "SavedModel")):
        if storage.is_file(os.path.join(path, name)):
            raise ValueError(f"{path!r} is a {kind} export, for other programs. Export the model with `format='jax'` "
                             "to load it here.")
    text, arrays = read_with_text(
        path, MANIFEST_KEY, "an exported model, as `Model.export` writes it",
        "A checkpoint folder is loaded with `trainer.load`.", "The `load_weights` of a model reads weights.")
    with errors.naming_file(path):
        return _exported(path, parse_json(text), arrays)


class ExportedModel:
    """The predictions of an exported model, as a function; `load_exported` creates it.

    Each new number of rows compiles once.

    Args:
      exported: program from the leaves of the weights and of the inputs to the leaves of the outputs.
      weights: Weights of the program, on the device to run on.
      input_spec: see below.
      outputs: structure of the outputs.
      batch_size: see below.

    Attributes:
      input_spec: inputs, a tree of `jax.ShapeDtypeStruct` with the rows first; JAX's symbol "rows" stands for any
        number.
      batch_size: number of rows of each call; None for any number.
      platforms: platforms of the program, such as `("cuda", "cpu")`.
    """

    def __init__(self, exported: jax.export.Exported, weights: Sequence[jax.Array], input_spec: Any,
                 outputs: jax.tree_util.PyTreeDef, batch_size: int | None):
        self.input_spec = input_spec
        self.batch_size = batch_size
        self.platforms = tuple(exported.platforms)
        self._call = compiled(exported.call)
        self._weights = list(weights)
        self._outputs = outputs
        self._output_text = _text(jax.tree.unflatten(outputs, exported.out_avals))

    def __repr__(self) -> str:
        return (f"ExportedModel({_text(self.input_spec)} -> {self._output_text}, for "
                f"{' and '.join(self.platforms)})")

    def __call__(self, x: PyTree) -> Any:
        """Returns the outputs for a batch, on the device.

        Args:
          x: NumPy or JAX arrays in the structure of `input_spec`, with the rows first. Dtypes of the same kind are
            cast.

        Raises:
          ValueError: if the structure, a shape or the kind of a dtype differs, or the number of rows differs from the
            exported batch size.
        """
        leaves, rows = self._checked(x)
        if self.batch_size not in (None, rows):
            raise ValueError(f"The model was exported for batches of {self.batch_size} rows. Received: {rows} rows. "
                             "`predict` takes any number, or export the model without `batch_size`.")
        return self._outputs_for(leaves)

    def predict(self, x: PyTree, batch_size: int | None = None) -> Any:
        """Returns the outputs for all rows as NumPy arrays, computed in batches.

        Args:
          x: inputs as in a call, with any number of rows.
          batch_size: rows of a batch; by default 32, or the exported batch size.

        Raises:
          ValueError: as in a call; also if `batch_size` differs from the exported batch size.
        """
        arguments.check_count("batch_size", batch_size, 1, optional=True)
        if self.batch_size is not None and batch_size not in (None, self.batch_size):
            raise ValueError(f"The model was exported for batches of {self.batch_size} rows. Received: "
                             f"batch_size={batch_size}. Leave it out.")
        size = self.batch_size or batch_size or DEFAULT_BATCH_SIZE
        leaves, rows = self._checked(x)
        batches = []
        for start in range(0, rows, size):
            batch = [leaf[start:start + size] for leaf in leaves]
            if self.batch_size is not None:
                batch = [_padded(leaf, size) for leaf in batch]
            outputs = jax.device_get(self._outputs_for(batch))
            batches.append(jax.tree.map(lambda leaf, count=rows - start: leaf[:count], outputs))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)

    @entry_point
    def _outputs_for(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self._outputs, self._call(self._weights, leaves))

    def _checked(self, x: PyTree) -> tuple[list[Any], int]:
        """Returns the leaves of inputs in the dtypes of the program, and their number of rows."""
        # As in training: a list of numbers is an array, and another top-level list is a tuple.
        x = tuple(x) if isinstance(x, list) and not is_leaf(x) else x
        structure: jax.tree_util.PyTreeDef
        leaves, structure = jax.tree.flatten(x, is_leaf=is_leaf)
        specs, expected = jax.tree.flatten(self.input_spec)
        if structure != expected:
            raise ValueError(f"`x` must be {_text(self.input_spec)}. Received: {errors.describe(x)}.")
        leaves = [leaf if isinstance(leaf, jax.Array) else as_arrays(leaf) for leaf in leaves]
        for name, leaf, spec in zip(leaf_names(self.input_spec), leaves, specs, strict=True):
            received, wanted = (leaf.shape[1:], leaf.dtype), (spec.shape[1:], spec.dtype)
            if leaf.ndim != len(spec.shape) or match_arrays({name: received}, {name: wanted}).mismatched:
                cast = (f" The program computes with {spec.dtype} alone: convert it by `.astype({str(spec.dtype)!r})`."
                        if received[0] == wanted[0] and leaf.ndim == len(spec.shape) else "")
                raise ValueError(
                    f"`{name}` must be {_text(spec)}, rows first. Received: {errors.describe(leaf)}.{cast}")
        rows = len(leaves[0])
        if rows == 0 or any(len(leaf) != rows for leaf in leaves):
            raise ValueError("All arrays of `x` must have the same number of rows, at least one. Received: "
                             f"{errors.describe(x)}.")
        return [leaf.astype(spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)], rows


# --- the program ---------------------------------------------------------------------------------------------------


def checked_platforms(platforms: Sequence[str] | None) -> tuple[str, ...]:
    if platforms is None:
        return tuple(dict.fromkeys((jax.export.default_export_platform(), "cpu")))
    if isinstance(platforms, str) or not isinstance(platforms, Sequence) or not platforms:
        raise errors.wrong_type("platforms", platforms, "a list of platforms, such as ['cpu', 'cuda']")
    for name in platforms:
        if name not in PLATFORMS:
            raise errors.unknown_name("platform", str(name), PLATFORMS)
    return tuple(dict.fromkeys(platforms))


def _device_for(path: str, platforms: Sequence[str]) -> jax.Device:
    """Returns the first device of JAX's current platform, or of another platform that the program supports."""
    if jax.export.default_export_platform() in platforms:
        return jax.local_devices()[0]
    for platform in platforms:
        try:
            return jax.local_devices(backend=platform)[0]
        except RuntimeError:  # there is none of it
            continue
    raise ValueError(f"{path!r} was exported for {', '.join(platforms)}; this machine has "
                     f"{jax.export.default_export_platform()}. Export the model with `platforms` that include it.")


def _exported(path: str, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> ExportedModel:
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path!r} has version {errors.brief(manifest['format_version'])} of the format of exported "
                         f"models. This trainer knows version {FORMAT_VERSION}. Install the one that wrote the file.")
    _check_can_serialize()
    try:
        exported = jax.export.deserialize(bytearray(arrays.pop(_PROGRAM).tobytes()))
        exported.mlir_module()  # the program itself would be read in the first call only
    except Exception as error:
        raise ValueError(
            f"{path!r} was exported with JAX {errors.brief(manifest['jax'])}, and JAX {jax.__version__} cannot read "
            f"it. JAX reads what the same or an older version exported. {errors.brief(error)}") from error
    device = _device_for(path, exported.platforms)
    weights = [jax.device_put(arrays.pop(name), device) for name in manifest["weights"]]
    arguments.check_count("batch_size", manifest["batch_size"], optional=True)
    rows = manifest["batch_size"] or any_rows()
    input_spec = tree_of(
        manifest["inputs"], lambda sizes, dtype: jax.ShapeDtypeStruct((rows, *sizes[1:]), jnp.dtype(dtype)))
    outputs = jax.tree.structure(tree_of(manifest["outputs"], lambda *leaf: 0))
    return ExportedModel(exported, weights, input_spec, outputs, manifest["batch_size"])


def _check_can_serialize() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError("JAX needs the package `flatbuffers` to write and read exported programs, and it is not "
                          "installed. Install it: `pip install flatbuffers`.")


def _text(tree: PyTree) -> str:
    """Returns shapes and dtypes in one text."""
    leaves = jax.tree.leaves(tree)
    if leaves and tree is leaves[0]:
        return f"{tree.dtype}({', '.join(map(str, tree.shape))})"
    return str(jax.tree.map(_text, tree))


def _padded(leaf: jax.Array | np.ndarray, rows: int) -> Any:
    """Returns an array padded with its last row to that many rows."""
    missing = rows - len(leaf)
    return leaf if missing == 0 else np.concatenate([np.asarray(leaf), np.repeat(np.asarray(leaf)[-1:], missing, 0)])
