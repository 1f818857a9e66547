"""A model's weights as a list, as variables, by layer, and as a safetensors file.

Owns the names of weights in files, and the effect of replaced weights on the rest of the state.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from trainer.core import arguments, errors, replica_context, tree_paths
from trainer.core.files import check_suffix, storage
from trainer.core.modules import FunctionalModule
from trainer.core.train_state import TrainState
from trainer.core.types import ReadInParts
from trainer.distribute.placement.placement import is_split_over_processes, retried, to_devices, to_host
from trainer.engine.model.core import saved_model
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.state_holder import StateHolder
from trainer.engine.model.views.layers import ModelLayer, outermost
from trainer.engine.model.views.variables import ModelVariable, cast_to
from trainer.engine.saving import export
from trainer.engine.saving.arrays.file_kinds import checked_path, open_arrays
from trainer.engine.saving.arrays.safetensors_file import MatchReport, match_arrays, save_arrays
from trainer.engine.saving.checkpoint import check_manifest, is_checkpoint, orbax_arrays
from trainer.optimizers.evaluation_params import map_averages

FORMAT_VERSION = 1
ADAPTERS = "lora"  # in the metadata of files of adapters
_VERSION_KEY = "format_version"


def weights_of(state: TrainState) -> list[jax.Array]:
    """Returns all weights of a state: the parameters, then the model state."""
    return jax.tree.leaves((state.params, state.model_state))


def get_weights(holder: StateHolder) -> list[np.ndarray]:
    """Returns copies of all weights on the host; see `Model.get_weights`."""
    return [np.array(to_host(leaf)) for leaf in weights_of(holder.shown)]


def set_weights(holder: StateHolder, weights: Sequence[Any]) -> None:
    """Replaces all weights; see `Model.set_weights`."""
    _set_some(holder, list(range(len(weights_of(holder.current)))), weights, "the model")


def variables_of(
    holder: StateHolder, configuration: Configuration, module: FunctionalModule
) -> list[tuple[str, ModelVariable]]:
    """Returns each weight with the path in its layer, in the order of `get_weights`."""
    state = holder.state_or_shapes
    params, model_state = tree_paths.named_leaves(state.params), tree_paths.named_leaves(state.model_state)

    def variable(number: int, path: str, is_trained: bool) -> ModelVariable:
        return ModelVariable(path, number, is_trained, functools.partial(_read, holder, number),
                             lambda value: _replace(holder, [(number, value)]))

    trained = {path: configuration.trainable and not configuration.options.is_frozen(path) for path in params}
    variables = [variable(number, *each) for number, each in enumerate(
        [*trained.items(), *((path, False) for path in model_state)])]
    return list(zip([*params, *map(module.layer_path, model_state)], variables, strict=True))


def layers_of(holder: StateHolder, configuration: Configuration, module: FunctionalModule) -> list[ModelLayer]:
    """Returns the direct layers of a module; see `Model.layers`."""
    if holder.is_built:
        with replica_context.enter(replica_context.context_outside(holder.inputs)):
            found = module.layers(holder.inputs)
    else:
        found = module.layers()

    def variables() -> list[tuple[str, ModelVariable]]:
        return variables_of(holder, configuration, module) if holder.is_built else []

    def write(written: Sequence[ModelVariable], weights: Any) -> None:
        _set_some(holder, [variable.number for variable in written], weights, "the layer")

    inside = [layer for layer in found if layer.path]
    return outermost(inside or found, variables, write)


def _read(holder: StateHolder, number: int) -> jax.Array:
    return weights_of(holder.shown)[number]


def _set_some(holder: StateHolder, numbers: Sequence[int], weights: Any, owner: str) -> None:
    """Checks new values for weights given by their numbers in `get_weights`, and replaces the weights."""
    leaves = [weights_of(holder.current)[number] for number in numbers]
    if not isinstance(weights, (list, tuple)):
        raise errors.wrong_type("weights", weights, "a list of arrays, as `get_weights` returns it")
    if len(weights) != len(leaves):
        raise ValueError(f"`weights` has {len(weights)} arrays, but {owner} has {len(leaves)}. Give as "
                         "many as `get_weights()` returns, in its order.")
    for index, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
        if np.shape(weight) != leaf.shape:
            raise ValueError(f"`weights[{index}]` has shape {np.shape(weight)}, but {owner}'s has {leaf.shape}.")
    # Copies: JAX would use the memory of the user's arrays on CPU.
    _replace(holder, ((number, weight if isinstance(weight, ReadInParts) else cast_to(
        f"weights[{index}]", np.array(weight), leaf.dtype)) for index, (
        number, weight, leaf) in enumerate(zip(numbers, weights, leaves, strict=True))))


def save_weights(
    holder: StateHolder, filepath: str | os.PathLike[str], overwrite: bool,
    selects: Callable[[str], bool] = lambda path: True, metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes all weights, or the weights selected by path, to one safetensors file; see `Model.save_weights`."""
    path = checked_path("filepath", filepath)
    check_suffix("filepath", path, ".safetensors")
    weights = {name: to_host(leaf) if is_split_over_processes(leaf) else leaf
               for name, leaf in _named_weights(holder.evaluated).items() if selects(name)}
    if jax.process_index() != 0:
        return
    check_may_write(path, overwrite)
    save_arrays(path, weights, {"package": export.PACKAGE, _VERSION_KEY: str(FORMAT_VERSION), **metadata},
                checksums=True)


def load_weights(holder: StateHolder, filepath: str | os.PathLike[str], patterns: Sequence[str] | None,
                 partial: bool | None, selects: Callable[[str], bool] = lambda path: True,
                 metadata: Mapping[str, str] = MappingProxyType({}), part: str | None = None) -> MatchReport:
    """Replaces weights by weights from a file, which must have the given metadata; see `Model.load_weights`."""
    everything = _named_weights(holder.current)
    names = _names_of_part(everything, part)
    order = {name: index for index, name in enumerate(everything)}
    numbers = {name: order[whole] for name, whole in names.items()}
    weights = {name: everything[whole] for name, whole in names.items() if selects(whole)}
    path = checked_path("filepath", filepath)
    if path.endswith((".h5", ".hdf5", ".keras")) and os.path.isfile(path):
        raise ValueError(f"{path!r} is a file of Keras. `trainer.models.load_keras_weights(model, path)` loads weights "
                         "of Keras's models; `load_weights` loads files of `save_weights`.")
    if not metadata and not storage.is_remote(path) and (found := orbax_arrays.find(path)):
        return _load_from_orbax(holder, path, found, patterns, partial, weights, numbers)
    expected = "a safetensors file, as `save_weights` writes it"
    with open_arrays(path, expected, "A checkpoint folder is loaded with `trainer.load`.") as file:
        _check_holds_weights(path, file.metadata)
        if ADAPTERS in file.metadata.keys() - metadata.keys() and not partial:
            raise ValueError(f"{path!r} holds adapters of LoRA, as `save_adapters` writes them, and not the weights of "
                             "a model. Make a model with adapters, `trainer.lora(model, ...)` with the same arguments, "
                             "and call its `load_adapters(path)`.")
        for key, value in metadata.items():
            if file.metadata.get(key) != value:
                raise ValueError(f"{path!r} was saved with {key}={errors.brief(file.metadata.get(key))}, and the model "
                                 f"has {key}={value}. Load it into a model that is made with the same arguments.")
        report = match_arrays(file.shapes, {name: (leaf.shape, leaf.dtype) for name, leaf in weights.items()},
                              patterns)
        try:
            report.raise_unless_complete(partial)
        except ValueError as error:
            raise ValueError(f"{error}\nThe file: {path!r}.{_hint_of_part(everything, file.shapes, part)}") from None
        _replace(holder, ((numbers[name], cast_to(name, file[name], weights[name].dtype)) for name in report.matched))
    return report


def _names_of_part(weights: Iterable[str], part: str | None) -> dict[str, str]:
    """Returns the weights of a part of the model by their names within it; all of them without a part.

    Raises:
      ValueError: if the model has no such part.

    >>> _names_of_part(["backbone/Dense_0/kernel", "batch_stats/backbone/norm/mean", "head/bias"], "backbone")
    {'Dense_0/kernel': 'backbone/Dense_0/kernel', 'batch_stats/norm/mean': 'batch_stats/backbone/norm/mean'}
    """
    if part is None:
        return {name: name for name in weights}
    arguments.require_text(part=part)
    found = {}
    for name in weights:
        collection, _, rest = name.partition(tree_paths.SEPARATOR)
        if name.startswith(f"{part}{tree_paths.SEPARATOR}"):
            found[name[len(part) + 1:]] = name
        elif rest.startswith(f"{part}{tree_paths.SEPARATOR}"):
            found[f"{collection}{tree_paths.SEPARATOR}{rest[len(part) + 1:]}"] = name
    if not found:
        parts = {name.partition(tree_paths.SEPARATOR)[0] for name in weights}
        raise errors.unknown_name("part", part, parts)
    return found


def _hint_of_part(weights: Iterable[str], in_file: Iterable[str], part: str | None) -> str:
    """Returns a sentence if a file has the weights of a part of the model, or an empty string."""
    names, found = list(weights), set(in_file)
    for name in dict.fromkeys(name.partition(tree_paths.SEPARATOR)[0] for name in names) if part is None else ():
        if found and found <= _names_of_part(names, name).keys():
            return f" It has the weights of {name!r}: give `part={name!r}`."
    return ""


def _load_from_orbax(holder: StateHolder, path: str, folder: str, patterns: Sequence[str] | None,
                     partial: bool | None, weights: Mapping[str, Any], numbers: Mapping[str, int]) -> MatchReport:
    """Replaces weights by weights of a tree of Orbax. Each process reads the data of its own devices."""
    if is_checkpoint(os.path.dirname(folder)):
        check_manifest(os.path.dirname(folder))  # written here, with checksums
    tree = orbax_arrays.OrbaxTree(folder)
    names = _names_in_tree(tree.specs, weights)
    report = match_arrays({name: tree.specs[there] for name, there in names.items()},
                          {name: (leaf.shape, leaf.dtype) for name, leaf in weights.items()}, patterns)
    try:
        report.raise_unless_complete(partial)
    except ValueError as error:
        raise ValueError(f"{error}\nThe checkpoint of Orbax: {path!r}.") from None
    read = tree.read({names[name]: weights[name].sharding for name in report.matched})
    _replace(holder, ((numbers[name], _in_dtype(name, read[names[name]], weights[name].dtype))
                      for name in report.matched))
    return report


def _names_in_tree(specs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, str]:
    """Returns the weights in a tree of Orbax: the path of each there, by the model's name or, of others, its own.

    A tree with a branch "params" is a training state, such as Flax's: of it the parameters count, and the collections
    that the model has, also in a branch "model_state", or "collections" of kauldron. NNX ends each path with "value".
    """
    names = {name: name for name in specs}
    if names and all(name.endswith("/value") for name in names):
        names = {name.removesuffix("/value"): there for name, there in names.items()}
    if not any(name.startswith("params/") for name in names) or any(name.startswith("params/") for name in weights):
        return names
    collections = {name.partition("/")[0] for name in weights}
    found = {}
    for name, there in names.items():
        branch, _, rest = name.partition("/")
        if branch in ("params", "model_state", "collections"):
            found[rest] = there
        elif branch in collections:
            found[name] = there
    return found


def _in_dtype(name: str, array: jax.Array, dtype: Any) -> Any:
    return array if array.dtype == dtype else cast_to(name, to_host(array), dtype)


def check_may_write(path: str, overwrite: bool) -> None:
    """Raises FileExistsError if the path exists and `overwrite` is False."""
    if not overwrite and storage.exists(path):
        raise FileExistsError(f"{path!r} exists already. Pass `overwrite=True` to replace it, or another path.")


def _replace(holder: StateHolder, values: Iterable[tuple[int, np.ndarray | jax.Array | ReadInParts]]) -> None:
    """Replaces weights by number with values in unshared memory, and restarts averages and unused optimizers."""
    state = holder.current
    leaves, structure = jax.tree.flatten((state.params, state.model_state))
    names = list(tree_paths.named_leaves(state.params))
    averages: dict[str, jax.Array] = {}
    _with_averages(state, averages.setdefault)
    for number, value in values:
        leaves[number] = _placed_like(leaves[number], value)
        average = averages.get(names[number]) if number < len(names) else None
        if average is not None:
            averages[names[number]] = _placed_like(average, value)
    params, model_state = jax.tree.unflatten(structure, leaves)
    opt_state = _with_averages(state, lambda name, _: averages[name])
    holder.set(state.replace(params=params, model_state=model_state, opt_state=opt_state))
    holder.start_unused_optimizers_again()


def _named_weights(state: TrainState) -> dict[str, jax.Array]:
    """Returns all weights by name, in the order of `get_weights`."""
    params, model_state = tree_paths.named_leaves(state.params), tree_paths.named_leaves(state.model_state)
    shared = sorted(params.keys() & model_state.keys())
    if shared:
        raise ValueError(f"A parameter and an array of the model state both have the path {shared[0]!r}, so a file "
                         "could not tell them apart. Rename the submodule or the collection.")
    return {**params, **model_state}


def _check_holds_weights(path: str, metadata: Mapping[str, str]) -> None:
    if export.MANIFEST_KEY in metadata:
        raise ValueError(f"{path!r} is an exported model. `trainer.load_exported` loads it; weights for `load_weights` "
                         "are written by `save_weights`.")
    if saved_model.DOCUMENT_KEY in metadata:
        raise ValueError(f"{path!r} is a training state, as `Model.save` writes it. `trainer.load` loads it.")
    if metadata.get("package") == export.PACKAGE and metadata.get(_VERSION_KEY) != str(FORMAT_VERSION):
        raise ValueError(f"{path!r} has version {metadata.get(_VERSION_KEY)} of the format of weights. This trainer "
                         f"knows version {FORMAT_VERSION}. Install the version that wrote the file.")


def _placed_like(leaf: jax.Array, values: np.ndarray | jax.Array | ReadInParts) -> jax.Array:
    """Returns values placed like `leaf`, in its dtype; each device gets its shard only."""
    if isinstance(values, jax.Array) and values.sharding == leaf.sharding:
        return values
    # Waits, so that copies of many arrays do not accumulate in host memory.
    if not isinstance(values, ReadInParts):
        return to_devices(values.astype(leaf.dtype, copy=False), leaf.sharding).block_until_ready()
    parts: dict[str, np.ndarray] = {}  # by their places, as several devices can have the same

    def part(index: tuple[slice, ...]) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = cast_to(values.name, values.read_part(index), leaf.dtype)
        return parts[str(index)]

    return retried(jax.make_array_from_callback, leaf.shape, leaf.sharding, part).block_until_ready()


def _with_averages(state: TrainState, average: Callable[[str, jax.Array], jax.Array]) -> Any:
    """Returns the optimizer state with `average(name of the parameter, its average)` as new averages."""
    def replaced(opt_state: Any, prefix: str) -> Any:
        def named(key_path: Any, leaf: jax.Array) -> jax.Array:
            return average(f"{prefix}{tree_paths.path_name(key_path)}", leaf)

        return opt_state._replace(average=jax.tree_util.tree_map_with_path(named, opt_state.average),
                                  inner=map_averages(named, opt_state.inner))

    if state.opt_state is None:
        return None
    if isinstance(state.optimizer, Mapping):
        return {name: replaced(part, f"{name}{tree_paths.SEPARATOR}") for name, part in state.opt_state.items()}
    return replaced(state.opt_state, "")
