"""A model's predictions as one file, which is used without the model's code.

Owns the format of that file: safetensors with the weights by path and a `jax.export` program that takes them, whose
metadata hold a manifest and a checksum. It knows a model only as a predict step and a state. Loading runs no Python
from a file and unpickles nothing.
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

from trainer.compile.entry_points import entry_point
from trainer.compile.jit import compiled
from trainer.core import arguments, errors, tree_paths
from trainer.core.replica_context import single_context
from trainer.core.train_state import TrainState
from trainer.data import pack_x_y_sample_weight
from trainer.data.sources.arrays import as_arrays, is_leaf
from trainer.saving.arrays.file_kinds import checked_path, read_with_text, save_with_text
from trainer.saving.arrays.safetensors_file import match_arrays
from trainer.step.steps import predict_one_batch

PACKAGE = "trainer-jax"
MANIFEST_KEY = "exported_model"
FORMAT_VERSION = 1
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEFAULT_BATCH_SIZE = 32
_PROGRAM = "program"


def save(path: str, predict_step: Callable[[TrainState, Any], Any], state: TrainState, inputs: Any,
         batch_size: int | None, platforms: Sequence[str] | None) -> None:
    """Writes what a predict step computes with a state, as a program for one device; see `Model.export`.

    Args:
      path: the file.
      predict_step: a pure function from the state and a batch to outputs.
      state: the state that it is given, but for the optimizer and its state.
      inputs: some rows of `x`, or their shapes.
      batch_size: rows of each batch; None for any.
      platforms: what the program can run on; None for JAX's platform here, and "cpu".
    """
    _check_can_serialize()
    platforms = _checked_platforms(platforms)
    manifest = {"package": PACKAGE, "format_version": FORMAT_VERSION, "jax": jax.__version__,
                "batch_size": batch_size, "inputs": _described(inputs, "x")}
    program, outputs, weights = _program(predict_step, state, inputs, batch_size, platforms)
    manifest |= {"outputs": _described(outputs, "outputs"), "weights": list(weights)}
    # Copies, because JAX keeps what it fetched of an array for as long as that array lives.
    arrays = {name: np.asarray(jnp.copy(leaf)) for name, leaf in weights.items()}
    arrays[_PROGRAM] = np.frombuffer(program, np.uint8)
    text = json.dumps(manifest)
    if jax.process_index() == 0:
        save_with_text(path, MANIFEST_KEY, text, arrays)


def load_exported(filepath: str | os.PathLike[str]) -> ExportedModel:
    """Loads a model that `Model.export` wrote. The model's code is not needed.

    The whole file is checked against its checksum first. Its program computes only, but it is compiled and run: load
    files that you trust.

    Args:
      filepath: the file.

    Returns:
      The model's predictions as a function.

    Raises:
      FileNotFoundError: if there is no such file; those with names like it are listed.
      ValueError: if the file is something else, is damaged, is of a newer format, or was not exported for this
        machine's platforms.
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
    text, arrays = read_with_text(
        path, MANIFEST_KEY, "an exported model, as `Model.export` writes it",
        "A checkpoint folder is loaded with `trainer.load`.", "The `load_weights` of a model reads weights.")
    with errors.naming_file(path):
        return _exported(path, json.loads(text), arrays)


class ExportedModel:
    """The predictions of an exported model, as a function; `load_exported` makes it.

    Each number of rows compiles once, when it is first met.

    Args:
      exported: the program, from the leaves of the weights and those of the inputs to those of the outputs.
      weights: its weights, on the device to run on.
      input_spec: see below.
      outputs: the structure of the outputs.
      batch_size: see below.

    Attributes:
      input_spec: the inputs, a tree of `jax.ShapeDtypeStruct`: rows first, JAX's symbol "rows" for any number of them.
      batch_size: how many rows each call must have; None for any number.
      platforms: what the program can run on, such as `("cuda", "cpu")`.
    """

    def __init__(self, exported: jax.export.Exported, weights: Sequence[jax.Array], input_spec: Any,
                 outputs: jax.tree_util.PyTreeDef, batch_size: int | None):
        self.input_spec = input_spec
        self.batch_size = batch_size
        self.platforms = tuple(exported.platforms)
        self._call = compiled(exported.call)
        self._weights = list(weights)
        self._outputs = outputs

    def __call__(self, x: Any) -> Any:
        """Returns the outputs for a batch, on the device.

        Args:
          x: NumPy or JAX arrays in the structure of `input_spec`, rows first. Dtypes of the same kind are cast.

        Raises:
          ValueError: if the structure, a shape or the kind of a dtype differs, or there is another number of rows than
            the model was exported for.
        """
        leaves, rows = self._checked(x)
        if self.batch_size not in (None, rows):
            raise ValueError(f"The model was exported for batches of {self.batch_size} rows. Received: {rows} rows. "
                             "`predict` takes any number, or export the model without `batch_size`.")
        return self._outputs_for(leaves)

    def predict(self, x: Any, batch_size: int | None = None) -> Any:
        """Returns the outputs for all rows as NumPy arrays, computed in batches.

        Args:
          x: as in a call, with any number of rows.
          batch_size: rows of a batch; by default 32, or what the model was exported for.

        Raises:
          ValueError: as a call does; and for another batch size than the model was exported for.
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

    def _checked(self, x: Any) -> tuple[list[Any], int]:
        """Returns the leaves of inputs in the dtypes of the program, and their rows."""
        # As in training: a list of numbers is an array, and another list at the top a tuple.
        x = tuple(x) if isinstance(x, list) and not is_leaf(x) else x
        structure: jax.tree_util.PyTreeDef
        leaves, structure = jax.tree.flatten(x, is_leaf=is_leaf)
        specs, expected = jax.tree.flatten(self.input_spec)
        if structure != expected:
            raise ValueError(f"`x` must be {_text(self.input_spec)}. Received: {errors.describe(x)}.")
        leaves = [leaf if isinstance(leaf, jax.Array) else as_arrays(leaf) for leaf in leaves]
        for name, leaf, spec in zip(_leaf_names(self.input_spec), leaves, specs, strict=True):
            received, wanted = (leaf.shape[1:], leaf.dtype), (spec.shape[1:], spec.dtype)
            if leaf.ndim != len(spec.shape) or match_arrays({name: received}, {name: wanted}).mismatched:
                raise ValueError(f"`{name}` must be {_text(spec)}, rows first. Received: {errors.describe(leaf)}.")
        rows = len(leaves[0])
        if rows == 0 or any(len(leaf) != rows for leaf in leaves):
            raise ValueError("All arrays of `x` must have the same number of rows, at least one. Received: "
                             f"{errors.describe(x)}.")
        return [leaf.astype(spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)], rows


# --- the program ---------------------------------------------------------------------------------------------------


def _program(
    predict_step: Callable[[TrainState, Any], Any], state: TrainState, inputs: Any, batch_size: int | None,
    platforms: Sequence[str],
) -> tuple[bytearray, Any, dict[str, jax.Array]]:
    """Returns the program, the shapes of its outputs, and the weights that it takes, by name."""
    leaves, structure = jax.tree.flatten((state.params, state.model_state))
    names = [f"{part}{tree_paths.SEPARATOR}{name}" for part in ("params", "model_state")
             for name in tree_paths.named_leaves(getattr(state, part))]
    step, seed = int(state.step), int(state.seed)
    input_leaves, input_structure = jax.tree.flatten(inputs)
    outputs: Any = None

    def predict_with(numbers: Sequence[int]) -> Any:
        """Returns the prediction as a compiled function of some of the weights and of the inputs."""
        def predict(weights: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
            nonlocal outputs
            given = dict(zip(numbers, weights, strict=True))
            params, model_state = jax.tree.unflatten(structure, [
                given[number] if number in given else jnp.zeros(leaf.shape, leaf.dtype)
                for number, leaf in enumerate(leaves)])
            here = TrainState(jnp.int32(step), params, model_state, None, jnp.uint32(seed))
            batch = pack_x_y_sample_weight(jax.tree.unflatten(input_structure, inputs))
            predictions = predict_one_batch(predict_step, single_context, here, batch, None)
            outputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)),
                                   predictions)
            return [jnp.asarray(leaf) for leaf in jax.tree.leaves(predictions)]

        return compiled(predict)

    def serialized(rows: Any) -> tuple[bytearray, list[int]]:
        specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        input_specs = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in input_leaves]
        used, predict = list(range(len(leaves))), predict_with(range(len(leaves)))
        reads = _reads(predict.trace(specs, input_specs).jaxpr.jaxpr)[:len(leaves)]
        if not all(reads):  # of a generator and a discriminator, say, only the generator
            used = [number for number in used if reads[number]]
            predict = predict_with(used)
        exported = jax.export.export(predict, platforms=platforms)([specs[number] for number in used], input_specs)
        return exported.serialize(), used

    try:
        program, used = serialized(batch_size or _any_rows())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if batch_size is None and _succeeds(lambda: serialized(DEFAULT_BATCH_SIZE)):
            raise ValueError("The model cannot be exported for any number of rows, as its code needs to know how many "
                             f"there are. Pass `batch_size={DEFAULT_BATCH_SIZE}`, say: `predict` of the loaded model "
                             f"then computes in batches of so many rows. {reason}") from error
        raise ValueError(f"The model cannot be exported for {', '.join(platforms)}. {reason}") from error
    return program, outputs, {names[number]: leaves[number] for number in used}


def _reads(program: Any) -> list[bool]:
    """Returns for each input of a jaxpr whether something is computed with it."""
    read = {id(variable) for equation in program.eqns for variable in equation.invars} | set(map(id, program.outvars))
    return [id(variable) in read for variable in program.invars]


def _succeeds(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception:
        return False
    return True


def _checked_platforms(platforms: Sequence[str] | None) -> tuple[str, ...]:
    if platforms is None:
        return tuple(dict.fromkeys((jax.export.default_export_platform(), "cpu")))
    if isinstance(platforms, str) or not isinstance(platforms, Sequence) or not platforms:
        raise errors.wrong_type("platforms", platforms, "a list of platforms, such as ['cpu', 'cuda']")
    for name in platforms:
        if name not in PLATFORMS:
            raise errors.unknown_name("platform", str(name), PLATFORMS)
    return tuple(dict.fromkeys(platforms))


def _device_for(path: str, platforms: Sequence[str]) -> jax.Device:
    """Returns the first device of JAX's platform here, or else of a platform that the program can run on."""
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
        raise ValueError(f"{path!r} has version {manifest['format_version']} of the format of exported models. This "
                         f"trainer knows version {FORMAT_VERSION}. Install the one that wrote the file.")
    _check_can_serialize()
    try:
        exported = jax.export.deserialize(bytearray(arrays.pop(_PROGRAM).tobytes()))
        exported.mlir_module()  # the program itself would be read in the first call only
    except Exception as error:
        raise ValueError(f"{path!r} was exported with JAX {manifest['jax']}, and JAX {jax.__version__} cannot read it. "
                         f"JAX reads what the same or an older version exported. {error}") from error
    device = _device_for(path, exported.platforms)
    weights = [jax.device_put(arrays.pop(name), device) for name in manifest["weights"]]
    rows = manifest["batch_size"] or _any_rows()
    input_spec = _tree(
        manifest["inputs"], lambda sizes, dtype: jax.ShapeDtypeStruct((rows, *sizes[1:]), jnp.dtype(dtype)))
    outputs = jax.tree.structure(_tree(manifest["outputs"], lambda *leaf: 0))
    return ExportedModel(exported, weights, input_spec, outputs, manifest["batch_size"])


def _check_can_serialize() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError("JAX needs the package `flatbuffers` to write and read exported programs, and it is not "
                          "installed. Install it: `pip install flatbuffers`.")


# --- the file ------------------------------------------------------------------------------------------------------


def _described(tree: Any, name: str) -> Any:
    """Returns a tree of arrays or shapes as JSON has it, with None for the number of rows.

    Raises:
      TypeError: if there are other containers in it than dicts with strings as keys, lists and tuples.
    """
    if tree is None:
        return None
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _described(value, f"{name}[{key!r}]") for key, value in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_described(value, f"{name}[{index}]") for index, value in enumerate(tree)]}
    if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        raise TypeError(f"An exported model has arrays in dicts with strings as keys, lists and tuples as inputs and "
                        f"outputs. Received: `{name}` is of type {type(tree).__name__}. Convert it, outputs in an "
                        "overridden `predict_step`.")
    # A size of outputs may follow from the number of rows.
    sizes = [size if isinstance(size, int) else str(size) for size in tree.shape[1:]]
    return {"shape": [None, *sizes], "dtype": str(tree.dtype)}


def _tree(described: Any, leaf: Callable[[list[Any], str], Any]) -> Any:
    """Returns the tree that `_described` was given, with `leaf(sizes, dtype)` as leaves."""
    if described is None:
        return None
    if "dict" in described:
        return {key: _tree(value, leaf) for key, value in described["dict"].items()}
    for kind in (list, tuple):
        if kind.__name__ in described:
            return kind(_tree(value, leaf) for value in described[kind.__name__])
    return leaf(described["shape"], described["dtype"])


def _any_rows() -> Any:
    return jax.export.symbolic_shape("rows")[0]


def _leaf_names(tree: Any) -> list[str]:
    return [f"x{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _text(tree: Any) -> str:
    """Returns shapes and dtypes for an error message."""
    leaves = jax.tree.leaves(tree)
    if leaves and tree is leaves[0]:
        return f"{tree.dtype}({', '.join(map(str, tree.shape))})"
    return str(jax.tree.map(_text, tree))


def _padded(leaf: Any, rows: int) -> Any:
    """Returns an array with its last row repeated at the end, so that it has so many rows."""
    missing = rows - len(leaf)
    return leaf if missing == 0 else np.concatenate([np.asarray(leaf), np.repeat(np.asarray(leaf)[-1:], missing, 0)])
