"""Loads and saves weights in the files of Hugging Face's `transformers`.

Owns the way of an array between file and model: read in parts, turned and divided by the rows of `hf_families.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from trainer.core.arguments import as_path, check_count
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import brief
from trainer.core.tree_paths import named_leaves
from trainer.models.weights.hf_config import CONFIG_NAME, check_config, check_exists, config_of, float_dtype
from trainer.models.weights.hf_families import Family, Row, family_of
from trainer.models.weights.model_layers import HasWeights, problems_of, shapes_of, weights_of
from trainer.models.weights.safetensors_files import INDEX_NAME, NAME, FileArray, arrays_at, weights_in

_FLOATS = ("F64", "F32", "F16", "BF16")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_NUMBER = re.compile(r"(?<=[.])\d+(?=[.])")
_ROWS_AT_ONCE = 4096


@explains_arguments
def load_hf_weights(model: HasWeights, path: str | os.PathLike[str], *, skip_head: bool = False) -> None:
    """Loads weights of Hugging Face's GPT-2, Llama 2 and 3, BERT or ViT into a model of the same architecture.

    Each device's part of an array is read from the file, cast to the dtype of the model's parameters, and placed, one
    array after another: the host needs memory for the largest array, and not for the model. With several processes,
    each reads the parts of its own devices. On any error, the model stays unchanged.

    Args:
      model: a built `trainer.Model` of a `TransformerLM`, `Llama`, `TransformerEncoder` or `ViT`; `from_hf` makes the
        module that fits. Its `param_dtype`, or the `precision` of `compile`, sets the dtype.
      path: a folder with `model.safetensors` or with several files and their index; or a file, or an index. If
        `config.json` is beside it, attributes that change the outputs of the same weights must agree.
      skip_head: whether to skip the layers after the body: classifiers, output layers, and a pooler that only the file
        or only the model has. The model keeps its weights of these layers.

    Raises:
      ValueError: if an array of the model is missing in the files, an array of the files is missing in the model,
        shapes differ, or an array is not floating-point; the message names all such arrays. Also if the configuration
        disagrees, the output layer of a model that ties it is not the table of the tokens, or a file is damaged.
      RuntimeError: if the model is not built.
      TypeError: if `model` is not a `trainer.Model` of such a module, or the path is not a path.
      ImportError: if safetensors is not installed.
      OSError: if a file cannot be read.

    Example:

    >>> module = models.from_hf("Llama-3.2-1B", max_len=2048)  # doctest: +SKIP
    >>> model = trainer.Model(module)  # doctest: +SKIP
    >>> model.build(np.zeros((1, 8), np.int32))  # doctest: +SKIP
    >>> models.load_hf_weights(model, "Llama-3.2-1B")  # doctest: +SKIP
    """
    path = as_path("path", path, "the path of a file or a folder")
    weights_of(model)  # is built
    family, module = family_of(model.module), model.module
    check_exists(path)
    arrays = _without_prefix(family, arrays_at(path))
    check_config(path if os.path.isdir(path) else os.path.dirname(path), module)
    shapes = _shapes_of(model)
    rows = _rows_of(family, module, shapes)
    arrays = {name: array for name, array in arrays.items() if not family.buffers.fullmatch(name)}
    if skip_head:
        arrays = {name: array for name, array in arrays.items() if not family.their_heads.fullmatch(name)}
        poolers, heads = {row.theirs for row in family.pooler}, {row.ours for row in family.head}
        wanted = {row.theirs for row in rows}
        rows = [row for row in rows if row.ours not in heads and (row.theirs in arrays or row.theirs not in poolers)]
        arrays = {name: array for name, array in arrays.items() if name in wanted or name not in poolers}
    tied = _take_tied(family, rows, arrays)
    _check_arrays(path, family, rows, arrays, shapes, skip_head)
    if tied is not None:
        _check_equal(path, *tied)
    numbers = {name: number for number, name in enumerate(shapes)}
    values: list[Any] = list(model.weights)
    for ours in dict.fromkeys(row.ours for row in rows):
        parts = [row for row in rows if row.ours == ours]
        values[numbers[ours]] = _Assembled(ours, shapes[ours], [(row, arrays[row.theirs]) for row in parts])
    model.set_weights(values)


@explains_arguments
def save_hf_weights(
    model: HasWeights, folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes weights and configuration to a folder that Hugging Face's `transformers` reads.

    The folder has `config.json`, and `model.safetensors` or several files and their index. `transformers` returns the
    outputs of the model, with logits instead of probabilities; with `ema_decay`, the files have the averages. Arrays
    that are split over devices are whole in the files. If several JAX processes train together, all must call this
    function; the first writes.

    Args:
      model: a built `trainer.Model` of a `TransformerLM`, `Llama`, `TransformerEncoder` or `ViT`.
      folder: the folder, which is made if it is missing, and must not have weights.
      dtype: dtype of the saved weights, such as "bfloat16"; None for the model's.
      max_file_bytes: largest size of a file, unless an array is larger; also the host memory that saving takes.

    Raises:
      FileExistsError: if the folder has weights.
      RuntimeError: if the model is not built.
      TypeError: if `model` is not a `trainer.Model` of such a module, or the path is not a path.
      ValueError: if a weight is too large for `dtype`, or it is not floating-point; if `transformers` has no such
        model, the model has adapters of LoRA, or `max_file_bytes` is not positive.
      ImportError: if safetensors is not installed.
      OSError: if the files cannot be written.

    Example:

    >>> models.save_hf_weights(model, "tuned", dtype="bfloat16")  # doctest: +SKIP
    >>> transformers.AutoModelForCausalLM.from_pretrained("tuned")  # doctest: +SKIP
    """
    folder = as_path("folder", folder, "the path of a folder")
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError("These files need safetensors. Install it: pip install 'trainer-jax[images]'.") from error
    weights_of(model)  # is built
    check_count("max_file_bytes", max_file_bytes, 1)
    family = family_of(model.module)
    shapes, variables = _shapes_of(model), {variable.path: variable for variable in model.weights}
    saved = float_dtype("dtype", next(iter(variables.values())).dtype if dtype is None else dtype)
    config = config_of(model.module, shapes, saved)
    prefix = family.prefix if config["architectures"] == [family.headed] else ""
    heads = {row.theirs for row in family.head}
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in _rows_of(family, model.module, shapes):
        rows[row.theirs].append(row)
    names = {theirs: theirs if theirs in heads else prefix + theirs for theirs in rows}
    sizes = {theirs: int(np.prod(_their_shape(parts[0], shapes))) * saved.itemsize for theirs, parts in rows.items()}
    groups = _grouped(sizes, max_file_bytes)
    files = [NAME] if len(groups) == 1 else [
        f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    is_writer = jax.process_index() == 0
    if is_writer:
        os.makedirs(folder, exist_ok=True)
        if present := weights_in(folder):
            raise FileExistsError(f"{folder!r} has weights already, such as {present[0]!r}. Remove them, or write to "
                                  "another folder.")
    for file, group in zip(files, groups, strict=True):
        arrays = {}
        with model.current_run.showing_averages():  # which the outputs are of
            for theirs in group:
                array = _joined([(row, variables[row.ours].numpy()) for row in rows[theirs]], names[theirs], saved)
                if is_writer:
                    arrays[names[theirs]] = array
        if is_writer:
            temporary = os.path.join(folder, f".{file}.{secrets.token_hex(6)}.tmp")
            with open(temporary, "xb") as new:
                mode = stat.S_IMODE(os.fstat(new.fileno()).st_mode)
            save_file(arrays, temporary, {"format": "pt"})
            os.chmod(temporary, mode)  # as of any new file: safetensors makes files that only the owner may read
            os.replace(temporary, os.path.join(folder, file))
    if not is_writer:
        return
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {
            names[theirs]: file for file, group in zip(files, groups, strict=True) for theirs in group}}
        _write_json(os.path.join(folder, INDEX_NAME), index)
    _write_json(os.path.join(folder, CONFIG_NAME), config)


@dataclasses.dataclass(frozen=True)
class _Assembled:
    """An array of the model, which is read from files in parts.

    Attributes:
      name: its path.
      shape: its shape.
      sources: the rows that fill it, and their arrays.
    """

    name: str
    shape: tuple[int, ...]
    sources: Sequence[tuple[Row, FileArray]]

    def read_part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the array."""
        *bounds, (first, last) = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        pieces = []
        for row, array in sorted(self.sources, key=lambda source: source[0].of_ours):
            width = self.shape[-1] // row.of_ours[1]
            begin = row.of_ours[0] * width
            start, stop = max(first, begin), min(last, begin + width)
            if start >= stop:
                continue
            offset = row.of_theirs[0] * width - begin
            ours = [*(slice(*bound) for bound in bounds), slice(start + offset, stop + offset)]
            piece = array.read(tuple(ours[axis] for axis in _inverse(row.axes, len(ours))))
            pieces.append(piece.transpose(row.axes) if row.axes else piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)


def _without_prefix(family: Family, arrays: Mapping[str, FileArray]) -> dict[str, FileArray]:
    """Returns arrays by the names of the tables; files of several classes, and of older versions, have others."""
    found = {}
    for name, array in arrays.items():
        short = name.removeprefix(family.prefix)
        for old, new in _OLD_NAMES.items():
            short = short.replace(old, new)
        found[short] = array
    return found


def _shapes_of(model: HasWeights) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in named_leaves(model.state_shapes().params).items()}


def _rows_of(family: Family, module: Any, shapes: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of the model's arrays, repeated for each block.

    Raises:
      ValueError: if an array of the model has no row.
    """
    rows = []
    for row in (*family.rows, *family.pooler, *family.head):
        count = getattr(module, family.depth) if "{n}" in row.theirs else 1
        rows += [numbered for number in range(count) if (numbered := row.numbered(number)).ours in shapes]
    if others := sorted(shapes.keys() - {row.ours for row in rows}):
        has_adapters = any(name.endswith("/lora_a") for name in others)
        advice = (" These are adapters of LoRA: save `model.merge()`, and load weights into the model that "
                  "`trainer.lora` is given.") if has_adapters else ""
        raise ValueError(f"`transformers` has no such weights of {type(module).__name__}: {_all(others)}.{advice}")
    return rows


def _their_shape(row: Row, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    *leading, last = shapes[row.ours]
    ours = (*leading, last // row.of_ours[1] * row.of_theirs[1])
    return tuple(ours[axis] for axis in _inverse(row.axes, len(ours)))


def _inverse(axes: Sequence[int], count: int) -> list[int]:
    """Returns the model's axis for each axis of the file."""
    return [axes.index(axis) for axis in range(count)] if axes else list(range(count))


def _take_tied(
    family: Family, rows: Sequence[Row], arrays: dict[str, FileArray]
) -> tuple[FileArray, FileArray] | None:
    """Removes an output layer that the model ties to a table, and returns both arrays."""
    if family.tied is None:
        return None
    name, ours = family.tied
    table = next(row.theirs for row in family.rows if row.ours == ours)
    if name not in arrays or table not in arrays or any(row.theirs == name for row in rows):
        return None
    return arrays.pop(name), arrays[table]


def _check_equal(path: str, head: FileArray, table: FileArray) -> None:
    def agree(start: int) -> bool:
        rows = slice(start, min(start + _ROWS_AT_ONCE, table.shape[0])), slice(0, table.shape[1])
        return np.array_equal(head.read(rows), table.read(rows))

    if head.shape != table.shape or not all(map(agree, range(0, table.shape[0], _ROWS_AT_ONCE))):
        raise ValueError(f"{path!r} has an output layer, {head.name!r}, other than the table of its tokens, and the "
                         "model ties them. Make the model with `tied_embedding=False`, if it has this attribute.")


def _check_arrays(path: str, family: Family, rows: Sequence[Row], arrays: Mapping[str, FileArray],
                  shapes: Mapping[str, tuple[int, ...]], skip_head: bool) -> None:
    wanted = {row.theirs: _their_shape(row, shapes) for row in rows}
    differing = [f"{arrays[name].name} (file: {shapes_of([arrays[name].shape])}, model: {shapes_of([shape])})"
                 for name, shape in wanted.items() if name in arrays and arrays[name].shape != shape]
    missing = [name for name in wanted if name not in arrays]
    unused = [array.name for name, array in arrays.items() if name not in wanted]
    if found := problems_of(missing, unused, differing, "array", _all):
        heads = [name for name in (*missing, *unused) if family.their_heads.fullmatch(name) or "pooler" in name]
        advice = " `skip_head=True` leaves the layers after the body as they are." if heads and not skip_head else ""
        raise ValueError(f"{path!r} does not fit the model: {found}. Make the module with `models.from_hf(folder)`, or "
                         f"with the attributes of the saved module.{advice}")
    if others := [f"{array.name} ({array.code})" for name, array in arrays.items() if array.code not in _FLOATS]:
        raise ValueError(f"{path!r} has arrays that are not floating-point numbers of 16 bits or more: {_all(others)}. "
                         "Quantized weights are not read: take the original weights.")


def _all(names: Sequence[str]) -> str:
    """Returns all names as text, with "*" for the numbers of blocks.

    >>> _all(["h.0.ln_1.bias", "h.1.ln_1.bias", "ln_f.bias"])
    'h.*.ln_1.bias (2), ln_f.bias'
    """
    originals = defaultdict(list)
    for name in names:
        originals[_NUMBER.sub("*", name, count=1)].append(name)
    return ", ".join(brief(f"{pattern} ({len(found)})" if len(found) > 1 else found[0])
                     for pattern, found in originals.items())


def _joined(sources: Sequence[tuple[Row, np.ndarray]], name: str, dtype: np.dtype) -> np.ndarray:
    """Returns an array of a file, from its parts in the model."""
    pieces = []
    for row, array in sorted(sources, key=lambda source: source[0].of_theirs):
        width = array.shape[-1] // row.of_ours[1]
        pieces.append(array[..., row.of_ours[0] * width:][..., :width])
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
    whole = whole.transpose(_inverse(sources[0][0].axes, whole.ndim))
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(whole.astype(dtype))
    if not (np.isfinite(cast) | ~np.isfinite(whole)).all():
        raise ValueError(f"The array {name!r} has numbers that are too large for {dtype}. Save it with another "
                         "`dtype`.")
    return cast


def _grouped(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Returns names in groups of at most `most` bytes, in their order."""
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > most:
            groups.append([])
        groups[-1].append(name)
    return groups


def _write_json(path: str, value: Any) -> None:
    temporary = f"{path}.{secrets.token_hex(6)}.tmp"
    with open(temporary, "w") as file:
        json.dump(value, file, indent=2, sort_keys=True)
    os.replace(temporary, path)
