"""ModelFiles: a model's weights as a list and as a file, and its export.

Owns the names of weights in files, and what replacing weights means for the rest of the state. The files themselves are
written and read in `weights_file.py` and `export.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import errors, tree_paths
from trainer.core.train_state import TrainState
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.sources.batches import as_batch
from trainer.distribute.placement.placement import is_split_over_processes, to_devices, to_host
from trainer.model import saved_model
from trainer.model.built_model import BuiltModel, first_rows
from trainer.model.compiled_model import CompiledModel
from trainer.saving import export
from trainer.saving.arrays.file_kinds import checked_path, open_arrays
from trainer.saving.arrays.safetensors_file import MatchReport, match_arrays, save_arrays
from trainer.step import output_checks

FORMAT_VERSION = 1
_VERSION_KEY = "format_version"


class ModelFiles(CompiledModel):
    """A compiled model that reads and writes its weights. See `Model`, which adds `fit` and the rest."""

    shows_averages = False

    # --- weights ---------------------------------------------------------------------------------------------------

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all weights: the parameters, then the model state."""
        state = self._shown_state()
        return [np.array(to_host(leaf)) for leaf in jax.tree.leaves((state.params, state.model_state))]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Replaces all weights. Moving averages, which `ema_decay` keeps, start anew from them.

        Args:
          weights: arrays in the order and with the shapes of `get_weights`.

        Raises:
          ValueError: if their number or a shape differs; nothing is replaced then.
          TypeError: if they are not a list.
        """
        state = self._require_built()
        leaves = jax.tree.leaves((state.params, state.model_state))
        if not isinstance(weights, (list, tuple)):
            raise errors.wrong_type("weights", weights, "a list of arrays, as `get_weights` returns it")
        if len(weights) != len(leaves):
            raise ValueError(f"`weights` has {len(weights)} arrays, but the model has {len(leaves)}.")
        for index, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
            if np.shape(weight) != leaf.shape:
                raise ValueError(f"`weights[{index}]` has shape {np.shape(weight)}, but the model's has {leaf.shape}.")
        # Copies: JAX would use the memory of the user's arrays on CPU.
        self._replace_weights((index, np.array(weight, leaf.dtype))
                              for index, (weight, leaf) in enumerate(zip(weights, leaves, strict=True)))

    @property
    def keeps_averages(self) -> bool:
        """Whether moving averages of the weights are kept (`ema_decay`)."""
        return self._rules is not None and self._options.ema_decay is not None

    def adopt_averages(self) -> None:
        """Makes the moving averages that `ema_decay` keeps the weights."""
        self.state = self.strategy.on_devices(self._require_built()).averaged()

    def _shown_state(self) -> TrainState:
        state = self._require_built()
        return self.strategy.on_devices(state).averaged() if self.shows_averages else state

    def count_params(self) -> int:
        """Returns the number of weights, the model state (such as BatchNorm's running averages) included."""
        state = self._require_built()
        return sum(leaf.size for leaf in jax.tree.leaves((state.params, state.model_state)))

    def save_weights(self, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Writes all weights to one safetensors file, which appears complete under its name or not at all.

        A parameter is named by its path, such as "Dense_0/kernel", and so is the model state, of which Linen's paths
        begin with the collection: "batch_stats/BatchNorm_0/mean". Dtypes are those that the model stores. Arrays that
        are split over devices are whole in the file, and are fetched one at a time. Moving averages that `ema_decay`
        keeps are not weights; `export` takes them.

        Where several JAX processes train together, all must call this and the first one writes.

        Args:
          filepath: the file, of any suffix, in a folder that exists.
          overwrite: whether a file that is there is replaced.

        Raises:
          RuntimeError: if the model is not built.
          FileExistsError: if the file exists and is not to be replaced.
          FileNotFoundError: if there is no such folder.
          ValueError: if two weights have one name, or a dtype that safetensors has no name for.
          TypeError: if `filepath` is not a path.

        Example:
          >>> model.save_weights("digits.safetensors")  # doctest: +SKIP

        Source: `keras.Model.save_weights`; the format is https://github.com/huggingface/safetensors.
        """
        path = checked_path("filepath", filepath)
        weights = {name: to_host(leaf) if is_split_over_processes(leaf) else leaf
                   for name, leaf in _named_weights(self._shown_state()).items()}
        if jax.process_index() != 0:
            return
        if not overwrite and os.path.exists(path):
            raise FileExistsError(f"{path!r} exists already. Pass `overwrite=True` to replace it, or another path.")
        save_arrays(path, weights, {"package": export.PACKAGE, _VERSION_KEY: str(FORMAT_VERSION)})

    def load_weights(self, filepath: str | os.PathLike[str], patterns: Sequence[str] | None = None,
                     partial: bool = False) -> MatchReport:
        """Replaces weights by those of a file, matched by name; see `save_weights` for the names.

        Each array is read, cast to the model's dtype and sent to the devices, of which each gets its part, before the
        next one is read. Moving averages that `ema_decay` keeps start anew from the weights that were loaded. The
        optimizer's state and the step stay as they are. If anything is refused, nothing has changed.

        Args:
          filepath: a safetensors file, by `save_weights` or by another program that uses these names.
          patterns: regular expressions over whole path segments, such as `["encoder", "head/bias"]`: only weights that
            one of them matches are loaded. None loads all.
          partial: whether weights may be missing from the file, or arrays of the file from the model.

        Returns:
          What was loaded and what was not.

        Raises:
          RuntimeError: if the model is not built.
          FileNotFoundError: if there is no such file; those with names like it are listed.
          IsADirectoryError: if it is a folder, as checkpoints are.
          ValueError: if the file is not a safetensors file, is damaged, has shapes or kinds of dtype that are not the
            model's or numbers that its dtypes cannot hold; if names do not match, unless `partial`; or if a pattern
            matches nothing.
          TypeError: if `filepath` is not a path, or `patterns` not a list of strings.

        Example:
          >>> print(model.load_weights("digits.safetensors", ["encoder"]))  # doctest: +SKIP
          12 arrays match.

        Source: `keras.Model.load_weights`.
        """
        weights = _named_weights(self._require_built())
        path = checked_path("filepath", filepath)
        expected = "a safetensors file, as `save_weights` writes it"
        with open_arrays(path, expected, "A checkpoint folder is loaded with `trainer.load`.") as file:
            _check_holds_weights(path, file.metadata)
            report = match_arrays(file.shapes, {name: (leaf.shape, leaf.dtype) for name, leaf in weights.items()},
                                  patterns)
            report.raise_unless_complete(partial)
            numbers = {name: index for index, name in enumerate(weights)}
            self._replace_weights((numbers[name], _cast(name, file[name], weights[name].dtype))
                                  for name in report.matched)
        return report

    def _replace_weights(self, values: Iterable[tuple[int, np.ndarray]]) -> None:
        """Replaces some weights, and starts their moving averages anew.

        Args:
          values: the number of a weight in `get_weights` and its new value, in its shape and dtype and in memory that
            nobody writes to. Each is placed before the next one is asked for.
        """
        state = self._require_built()
        leaves, structure = jax.tree.flatten((state.params, state.model_state))
        names = list(tree_paths.named_leaves(state.params))
        averages: dict[str, jax.Array] = {}
        _with_averages(state, averages.setdefault)
        for number, value in values:
            leaves[number] = _placed_like(leaves[number], value)
            average = averages.get(names[number]) if number < len(names) else None
            if average is not None:
                averages[names[number]] = _placed_like(average, value.astype(average.dtype))
        params, model_state = jax.tree.unflatten(structure, leaves)
        opt_state = _with_averages(state, lambda name, _: averages[name])
        self._state = state.replace(params=params, model_state=model_state, opt_state=opt_state)
        self._state_is_lent = True

    # --- the training state ----------------------------------------------------------------------------------------

    def save(self, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Writes the training state: weights, optimizer, step and seed. `trainer.load` loads it.

        It appears complete or not at all, with checksums: a damaged one is refused. All processes must call this.

        Args:
          filepath: a file, if the name has a suffix such as ".keras", which is then a safetensors file whatever the
            suffix is; else a folder, which several processes and large models need.
          overwrite: whether what is there is replaced.

        Raises:
          RuntimeError: if the model is not built.
          FileExistsError: if there is something that is not to be replaced, or that is not a checkpoint.
          OSError: if it cannot be written. What was there before stays.
          TypeError: if `filepath` is not a path.

        Example:
          >>> model.save("digits")  # doctest: +SKIP

        Source: `keras.Model.save`.
        """
        path = checked_path("filepath", filepath)
        state = self._require_built()
        if not overwrite and os.path.exists(path):
            raise FileExistsError(f"{path!r} exists already. Pass `overwrite=True` to replace it, or another path.")
        saved_model.save(path, state, self._sample_spec)

    # --- export ----------------------------------------------------------------------------------------------------

    def export(self, filepath: str | os.PathLike[str], *, batch_size: int | None = None,
               platforms: Sequence[str] | None = None, sample: Any = None) -> None:
        """Writes what `predict` computes, with the weights, to a file that `trainer.load_exported` can use.

        Whoever loads it needs no code of the model. Where `ema_decay` keeps moving averages, these are the weights, as
        in `predict`. The computation is for one device, whatever the model's strategy is; the weights are gathered on
        the host for it. A file that is there is replaced, in one step. Of several JAX processes the first one writes,
        but all must call this.

        Args:
          filepath: the file, of any suffix, in a folder that exists.
          batch_size: rows of each batch, for models that cannot be exported for any number of rows; None for any.
          platforms: what it can run on, of "cpu", "cuda", "rocm" and "tpu"; by default JAX's platform here, and "cpu".
          sample: some rows of inputs `x`. Without it, the inputs are like those that the model was built on.

        Raises:
          RuntimeError: if the model is not built.
          ValueError: if the model cannot be exported so, an argument is not a possible one, or `sample_inputs` is
            overridden and there is no `sample`.
          TypeError: if inputs or outputs are in other containers than dicts, lists and tuples.
          FileNotFoundError: if there is no such folder.
          ImportError: if the package `flatbuffers` is not installed.

        Example:
          >>> model.export("digits.export")  # doctest: +SKIP
          >>> trainer.load_exported("digits.export").predict(images)  # doctest: +SKIP

        Source: `keras.Model.export`; the program is `jax.export`'s.
        """
        state = self._require_built()
        path = checked_path("filepath", filepath)
        output_checks.check_count("batch_size", batch_size, 1, optional=True)
        # All on the devices: what a device computes with is not in the host's memory spaces.
        averaged = self.strategy.on_devices(state).averaged()
        export.save(path, self.predict_step, averaged, self._exported_inputs(sample), batch_size, platforms)

    def _exported_inputs(self, sample: Any) -> Any:
        if sample is not None:
            return unpack_x_y_sample_weight(first_rows(as_batch(pack_x_y_sample_weight(sample))))[0]
        if type(self).sample_inputs is not BuiltModel.sample_inputs:
            raise ValueError("The model overrides `sample_inputs`, so what its `predict_step` is given is not known. "
                             "Pass `sample`, some rows of `x` as `predict` takes them.")
        return self._sample_spec


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
                         f"knows version {FORMAT_VERSION}. Install the one that wrote the file.")


def _cast(name: str, values: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns values in another dtype of the same kind; raises ValueError for what that cannot hold."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
        is_float = jnp.issubdtype(dtype, np.inexact)
        kept = np.isfinite(cast) | ~np.isfinite(values) if is_float else cast.astype(values.dtype) == values
    if not kept.all():
        raise ValueError(f"The array {name!r} has numbers that are too large for the model's {np.dtype(dtype)}; in the "
                         f"file it is {values.dtype}. Compile the model with a wider `precision`.")
    return cast


def _placed_like(leaf: jax.Array, values: np.ndarray) -> jax.Array:
    """Returns host values placed as `leaf` is; each device gets its part only."""
    # At once, or copies of many arrays could wait in the host's memory.
    return to_devices(values, leaf.sharding).block_until_ready()


def _with_averages(state: TrainState, average: Callable[[str, jax.Array], jax.Array]) -> Any:
    """Returns the optimizer's state with `average(name of the parameter, its moving average)` as moving averages."""
    def replaced(opt_state: Any, prefix: str) -> Any:
        return opt_state._replace(average=jax.tree_util.tree_map_with_path(
            lambda key_path, leaf: average(f"{prefix}{tree_paths.path_name(key_path)}", leaf), opt_state.average))

    if state.opt_state is None:
        return None
    if isinstance(state.optimizer, Mapping):
        return {name: replaced(part, f"{name}{tree_paths.SEPARATOR}") for name, part in state.opt_state.items()}
    return replaced(state.opt_state, "")
