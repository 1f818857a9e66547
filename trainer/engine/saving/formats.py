"""A model's predictions in the formats of other programs: StableHLO, TensorFlow's SavedModel, ONNX.

Owns the requirements of each format, and the check that the written program equals `predict`. `prediction.py` provides
the prediction as a function; the converters are packages that are imported on use.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.typing import DTypeLike

from trainer.core import errors
from trainer.core.files import check_suffix, storage
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.engine.saving import export, onnx_format
from trainer.engine.saving.arrays.safetensors_file import save_arrays
from trainer.engine.saving.checkpoint import disk
from trainer.engine.saving.prediction import (
    Prediction,
    check_names,
    describe_tree,
    exported_program,
    named,
    prediction_of,
    without_source_locations,
)

FORMATS = ("jax", "stablehlo", "saved_model", "onnx")
SIGNATURE, SAVED_MODEL = export.SIGNATURE, export.SAVED_MODEL
TEXT, ARTIFACT, WEIGHTS = "model.mlir", "model.mlirbc", "weights.safetensors"
FORMAT_VERSION = 1
_ASSERTION = "shape_assertion"  # a custom call of JAX's, which checks shapes and computes nothing
_OF_SUFFIX = {
    ".onnx": "For ONNX, give `format=\"onnx\"`.",
    ".pb": "For a SavedModel, give a folder and `format=\"saved_model\"`.",
    ".tflite": "TensorFlow Lite is not written. Phones also run ONNX: give `format=\"onnx\"` and the suffix '.onnx'.",
}
_EXTRAS = {"saved_model": "tensorflow", "onnx": "onnx"}


def check(format_name: str, path: str) -> None:
    """Raises ValueError for an unknown format, or a name with the suffix of another format."""
    if format_name not in FORMATS:
        raise ValueError(f"{errors.unknown_name('format', str(format_name), FORMATS)} \"jax\" is read by "
                         "`trainer.load_exported`, \"onnx\" by onnxruntime and others, also on phones, "
                         "\"saved_model\" by TensorFlow, \"stablehlo\" by IREE. "
                         f"See {errors.page_url('export')}")
    if format_name == "onnx":
        return
    suffix = os.path.splitext(path)[1]
    if suffix in _OF_SUFFIX:
        raise ValueError(f"`filepath` has the suffix {suffix!r}. Received: {path!r}, and format={format_name!r}. "
                         f"{_OF_SUFFIX[suffix]}")
    check_suffix("filepath", path, ".export", written=f"the format {format_name!r}")


def save(format_name: str, path: str, predict_step: Callable[[TrainState, Any], Any], state: TrainState, inputs: PyTree,
         batch_size: int | None, platforms: Sequence[str] | None) -> None:
    """Writes the computation of a predict step with a state; see `Model.export`.

    Args:
      format_name: a name in `FORMATS`.
      path, predict_step, state, inputs, batch_size, platforms: arguments of `export.save`.

    Raises:
      ValueError: for an unknown format, or if the format does not support the model.
      FileExistsError: if `path` exists and is not an export in this format.
      ImportError: if a package of the converter is not installed.
    """
    check(format_name, path)
    if format_name == "jax":
        export.save(path, predict_step, state, inputs, batch_size, platforms)
        return
    _check_target(format_name, path)
    converters: dict[str, Callable[..., None]] = {
        "stablehlo": _stablehlo, "saved_model": _saved_model, "onnx": onnx_format.save}
    modules = _required(format_name)
    names = export.checked_platforms(platforms)
    prediction = prediction_of(predict_step, state, inputs, batch_size, format_name)
    describe_tree(inputs, "x"), describe_tree(prediction.outputs, "outputs")  # refuses other containers
    converters[format_name](path, prediction, batch_size, names if platforms is not None else names[:1], *modules)


# --- StableHLO -------------------------------------------------------------------------------------------------------


def _stablehlo(path: str, prediction: Prediction, batch_size: int | None, platforms: Sequence[str]) -> None:
    if len(platforms) != 1:
        raise ValueError("A StableHLO program is for one platform, as other runtimes take no argument that says which. "
                         f"Received: platforms={list(platforms)}.")

    text, artifact, version = _portable(exported_program(prediction, batch_size, platforms).mlir_module())
    kept = list(prediction.weights)
    arrays = prediction.host_weights()
    signature = {
        "package": export.PACKAGE, "format": "stablehlo", "format_version": FORMAT_VERSION, "jax": jax.__version__,
        "stablehlo": version, "platform": platforms[0], "function": "main", "batch_size": batch_size,
        "arguments": [*({"weight": name, **_spec(arrays[name])} for name in kept),
                      *({"input": name, **_spec(leaf, batch_size)} for name, leaf in named(prediction.inputs, "x"))],
        "results": [{"output": name, **_spec(leaf, batch_size)} for name, leaf in named(prediction.outputs, "outputs")],
        "inputs": describe_tree(prediction.inputs, "x"), "outputs": describe_tree(prediction.outputs, "outputs"),
        "sha256": {TEXT: hashlib.sha256(text.encode()).hexdigest(), ARTIFACT: hashlib.sha256(artifact).hexdigest()}}
    with _Folder(path) as folder:
        save_arrays(os.path.join(folder, WEIGHTS), arrays, {"package": export.PACKAGE}, checksums=True)
        for name, content in ((TEXT, text.encode()), (ARTIFACT, artifact),
                              (SIGNATURE, json.dumps(signature, indent=1).encode())):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)


def _portable(text: str) -> tuple[str, bytes, str]:
    """Returns a program's text without JAX-specific parts, its portable bytecode, and the bytecode's version."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        assertions: list[Any] = []

        def visit(operation: Any) -> Any:
            is_call = operation.name == "stablehlo.custom_call"
            if is_call and _ASSERTION in str(operation.attributes["call_target_name"]):
                assertions.append(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        for operation in assertions:
            operation.erase()
        module.operation.verify()
        portable = str(module.operation.get_asm(enable_debug_info=False))
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_12)
        return portable, stablehlo.serialize_portable_artifact(module, version), version


# --- SavedModel ------------------------------------------------------------------------------------------------------


def _saved_model(path: str, prediction: Prediction, batch_size: int | None, platforms: Sequence[str],
                 jax2tf: Any, tensorflow: Any) -> None:
    tf = tensorflow
    check_names(prediction)
    rows = "rows" if batch_size is None else str(batch_size)
    shapes = [f"({', '.join([rows, *map(str, leaf.shape[1:])])})" for leaf in jax.tree.leaves(prediction.inputs)]
    converted = jax2tf.convert(
        prediction.function, polymorphic_shapes=[None, shapes if batch_size is None else None], with_gradient=False,
        native_serialization_platforms=list(platforms))
    module = tf.Module()
    module.weights = [tf.Variable(array, trainable=False, name=name.replace("/", "."))
                      for name, array in prediction.host_weights().items()]
    output_names = [name for name, _ in named(prediction.outputs, "outputs")]
    specs = [tf.TensorSpec((batch_size, *leaf.shape[1:]), _tf_dtype(tf, leaf.dtype), name=name)
             for name, leaf in named(prediction.inputs, "x")]

    @tf.function(autograph=False, input_signature=specs)
    def serve(*inputs: Any) -> dict[str, Any]:
        return dict(zip(output_names, converted(list(module.weights), list(inputs)), strict=True))

    module.serve = serve
    try:
        with without_source_locations():
            concrete = serve.get_concrete_function()
    except Exception as error:
        raise ValueError(f"The model cannot be exported as a SavedModel. {type(error).__name__}: {error}") from error
    with _Folder(path) as folder, without_source_locations():  # TensorFlow traces the signature again
        tf.saved_model.save(module, folder, signatures={"serving_default": concrete})


def _tf_dtype(tf: Any, dtype: DTypeLike) -> Any:
    return tf.as_dtype(dtype.name if hasattr(dtype, "name") else np.dtype(dtype).name)


# --- common to all formats -------------------------------------------------------------------------------------------


def _required(format_name: str) -> list[Any]:
    """Returns the modules that write a format."""
    names = {"stablehlo": [], "saved_model": ["jax.experimental.jax2tf", "tensorflow"],
             "onnx": ["jax2onnx", "onnx", "onnxruntime"]}[format_name]
    try:
        with onnx_format.quiet():
            return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ImportError(f"The format {format_name!r} is written with {' and '.join(names)}, of which a part is not "
                          f"installed ({error}): pip install 'trainer-jax[{_EXTRAS[format_name]}]'") from error


def _check_target(format_name: str, path: str) -> None:
    """Raises an error for a path that is not writable, or has other content."""
    if storage.is_remote(path):
        if format_name != "onnx":
            raise ValueError(f"The format {format_name!r} is a folder with the names that other programs expect, which "
                             f"no object store replaces in one step. Received: {path!r}. Export to a local folder, and "
                             "copy it.")
        if not path.endswith(".onnx"):
            raise ValueError(f"`filepath` must end in '.onnx' for this format. Received: {path!r}.")
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{path!r} cannot be written: there is no folder {folder!r}. Make it first.")
    if format_name == "onnx":
        if not path.endswith(".onnx"):
            raise ValueError(f"`filepath` must end in '.onnx' for this format. Received: {path!r}.")
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path!r} is a folder. Give the name of a file.")
        return
    mark = SAVED_MODEL if format_name == "saved_model" else SIGNATURE
    if os.path.lexists(path) and not (os.path.isdir(path) and (not os.listdir(path) or mark in os.listdir(path))):
        raise FileExistsError(f"{path!r} exists, and is no folder that was exported as {format_name!r}. Give another "
                              "path, or remove it.")


def _spec(leaf: Any, batch_size: int | None = 0) -> dict[str, Any]:
    """Returns shape and dtype for JSON; with `batch_size`, of rows, with None for any number."""
    shape = [size if isinstance(size, int) else str(size) for size in leaf.shape]
    return {"shape": shape if batch_size == 0 else [batch_size, *shape[1:]], "dtype": str(leaf.dtype)}


class _Folder:
    """A new folder that takes its name, in one step, when it is complete."""

    def __init__(self, path: str):
        self._path = os.path.abspath(path)
        self._temporary = disk.temporary_path(self._path)

    def __enter__(self) -> str:
        os.mkdir(self._temporary)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and jax.process_index() == 0:
            disk.put_in_place(self._temporary, self._path)
        else:
            shutil.rmtree(self._temporary, ignore_errors=True)
