"""The state, the weights, the layers and the configuration of a model, as users read, set, save and load them.

Owns this part of the public methods; `model/core`, `weights_io.py` and `forward.py` do the work.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, SupportsIndex

import jax
import numpy as np

from trainer.core import arguments, errors
from trainer.core.ambient.interactive_logging import is_interactive_logging_enabled, print_message
from trainer.core.ambient.notebook import print_table
from trainer.core.calls.entry_points import with_entry_points
from trainer.core.files import check_suffix
from trainer.core.foreign_names import ForeignNames
from trainer.core.modules import CallKwargs, as_functional, print_summary, render_summary
from trainer.core.rng import default_seed
from trainer.core.train_state import TrainState
from trainer.core.types import ArrayLike, ArrayTree
from trainer.core.updates.spikes import SpikeRule
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.sources.arrays import Batch, as_batch
from trainer.distribute import Strategy, get_strategy
from trainer.engine.model import foreign_names, forward, weights_io
from trainer.engine.model.core import saved_model
from trainer.engine.model.core.model_core import CurrentRun, ModelCore, copied
from trainer.engine.model.core.state_holder import first_rows
from trainer.engine.model.overridable_steps import OverridableSteps
from trainer.engine.model.types import ModuleLike
from trainer.engine.model.views.layers import ModelLayer, find
from trainer.engine.model.views.variables import ModelVariable
from trainer.engine.saving import formats
from trainer.engine.saving.arrays.file_kinds import checked_path
from trainer.engine.saving.arrays.safetensors_file import MatchReport
from trainer.metrics import Metric

if TYPE_CHECKING:
    from trainer.distribute.parameter_server.processes.wire import Resource

Path = str | os.PathLike[str]


def _some_rows(sample: ArrayTree) -> Batch:
    """Returns a batch for initialization from the first rows of a sample of `x`."""
    try:
        return first_rows(as_batch(pack_x_y_sample_weight(sample)))
    except ValueError as error:
        raise ValueError("`sample` must be some rows of `x`, and no shape: `np.zeros((1, 28, 28))`, or `(images[:1], "
                         "texts[:1])` for a call with two inputs, or a dict of these by name. "
                         f"Received: {errors.describe(sample)}. {error}") from error


@with_entry_points
class StatefulModel(OverridableSteps, ForeignNames):
    """A Flax module and its training state. `Model` compiles and runs it."""

    _foreign_names = foreign_names.NAMES

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        foreign_names.warn_of_uncalled_methods(cls)

    def __init__(self, module: ModuleLike, *, seed: int | None = None, name: str | None = None,
                 train_kwargs: Mapping[str, Any] | None = None, eval_kwargs: Mapping[str, Any] | None = None,
                 eval_module: ModuleLike | None = None):
        functional = as_functional(module, CallKwargs(train_kwargs, eval_kwargs), eval_module)
        seed = default_seed() if seed is None else arguments.as_seed("seed", seed)
        self.module = module
        if name is not None:
            arguments.require_text(name=name)
        self.name = name or functional.name
        self.stop_training = self.stop_evaluating = self.stop_predicting = False
        self._core = ModelCore(self, OverridableSteps, functional, get_strategy(), seed)

    @property
    def strategy(self) -> Strategy:
        """The strategy in whose scope the model was made."""
        return self._core.strategy

    @property
    def current_run(self) -> CurrentRun:
        """The current run of the model, or its last run, for callbacks."""
        return self._core.current_run

    def __repr__(self) -> str:
        size = "not built"
        if self.built:
            state = self._core.state.state_or_shapes
            size = f"{sum(leaf.size for leaf in jax.tree.leaves((state.params, state.model_state))):,} weights"
        compiled = "compiled" if self._core.configuration.is_compiled else "not compiled"
        return f"{type(self).__name__}({self.name!r}, {size}, {compiled}, {self.strategy!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self._refuse_a_copy_of_weights()
        return super().__reduce_ex__(protocol)

    def _refuse_a_copy_of_weights(self) -> None:
        if self.built:
            raise TypeError("A model with weights cannot be copied or pickled, as its arrays and programs are on "
                            "devices, and steps reuse the arrays. Make another model and give it `get_weights()`, or "
                            "use `model.save` and `trainer.load`.")

    def __as_resource__(self) -> Resource | None:
        """Returns the resource that represents this model in workers of a parameter-server cluster."""
        from trainer.engine.model import worker_copy  # for the few programs with parameter servers

        return worker_copy.as_resource(self)

    def __train_step_as_resource__(self) -> Any:
        """Returns the resource that represents `train_step` in workers of parameter servers, for `fit`."""
        from trainer.engine.model import worker_copy

        return worker_copy.SharedTrainStep(self)

    def __copy__(self) -> Self:
        self._refuse_a_copy_of_weights()
        return copied(self, self.strategy, copy.deepcopy(self._core.configuration))

    def __call__(self, x: ArrayTree, training: bool = False) -> Any:
        """Returns the module's outputs for `x`, computed as a single batch, in the module's own containers.

        Builds the model if needed. `training=True` activates dropout; running averages are not updated. The call is
        compiled for each shape of `x`, unless `run_eagerly` is set or `apply` is overridden. `x` may be traced, for
        example by `jax.grad`. In a custom `jax.jit` the weights would be constants, so call `apply` there.

        Raises:
          RuntimeError: if the model is not built, and `x` is traced.
        """
        self._core.check_is_outside_of_steps()
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
        if not self.built:
            if is_traced:
                raise RuntimeError(f"The model {self.name} is not built, and cannot be in a step or another function "
                                   "that JAX traces. Call its `build(sample)` before, with some rows of inputs.")
            self.build(x)
        # A tracing transformation may keep the state indefinitely.
        state = self.strategy.on_devices(self._core.state.borrow() if is_traced else self._core.state.current)
        if not is_traced:
            x = unpack_x_y_sample_weight(as_batch(pack_x_y_sample_weight(x)))[0]
        is_own = not (self._core.overrides("apply") or self._core.overrides("make_rng"))
        return forward.outputs_of(
            self.apply, self._core.configuration, state, x, training, may_compile=is_own and not is_traced)

    # --- the configuration -----------------------------------------------------------------------------------------

    @property
    def loss(self) -> Any:
        """The `loss` argument of `compile`; None before. To change it, call `compile`."""
        return self._core.configuration.given.get("loss")

    @loss.setter
    def loss(self, value: object) -> NoReturn:
        raise _is_compiled("loss")

    @property
    def metrics(self) -> list[Metric]:
        """All metrics, as in Keras: the loss metric, a metric for all metrics of `compile`, and metric attributes.

        A custom step may update them and return `{metric.name: metric.result() for metric in self.metrics}`. To change
        the metrics of `compile`, call it again.
        """
        return [*self._core.configuration.tracked_metrics(),
                *(value for value in vars(self).values() if isinstance(value, Metric))]

    @metrics.setter
    def metrics(self, value: object) -> NoReturn:
        raise _is_compiled("metrics")

    @property
    def metrics_names(self) -> list[str]:
        """The names of `metrics`. As in Keras 3, all metrics of `compile` together are "compile_metrics"."""
        return [metric.name for metric in self.metrics]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of `metrics` by log name: of the last validation or epoch, or of a step.

        A custom step can return them as its logs. Losses of single outputs are in the logs only.
        """
        results: dict[str, Any] = {}
        for metric in self.metrics:
            result = metric.result()
            results.update(result if isinstance(result, Mapping) else {metric.name: result})
        return {name: _as_number(result) for name, result in results.items()}

    def reset_metrics(self) -> None:
        """Resets the state of all `metrics`. Metrics updated by steps start again with each epoch automatically."""
        for metric in self.metrics:
            metric.reset_state()

    @property
    def run_eagerly(self) -> bool:
        """Whether steps run uncompiled. Assignment keeps the optimizer state; the next `compile` resets the value.

        Raises:
          RuntimeError: on assignment while the model is running.
          ValueError: on assignment of True with `compile(deterministic=True)`.
        """
        return self._core.configuration.options.eager

    @run_eagerly.setter
    def run_eagerly(self, value: bool) -> None:
        if bool(value) != self.run_eagerly:
            self._core.current_run.check_is_idle("Set `run_eagerly`")
            self._core.configuration.set_eager(bool(value))

    @property
    def jit_compile(self) -> bool:
        """Whether steps are compiled: the opposite of `run_eagerly`."""
        return not self.run_eagerly

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.run_eagerly = not value  # "auto" compiles

    @property
    def trainable(self) -> bool:
        """Whether the default `train_step` trains and BatchNorm updates its averages. Assignment recompiles steps."""
        return self._core.configuration.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._core.current_run.check_is_idle("Set `trainable`")
        self._core.configuration.set_trainable(bool(value))

    @property
    def skip_non_finite(self) -> bool:
        """Whether updates with non-finite gradients are skipped. Assignment recompiles the train step.

        The optimizer state is kept. The next `compile` resets the value.
        """
        return self._core.configuration.options.skip_non_finite

    @skip_non_finite.setter
    def skip_non_finite(self, value: bool) -> None:
        if value != self.skip_non_finite:
            self._core.current_run.check_is_idle("Set `skip_non_finite`")
            self._core.configuration.set_skip_non_finite(bool(value))
            self._core.state.take_over_rules()

    @property
    def spike_rule(self) -> SpikeRule | None:
        """The rule by which updates are skipped, as `callbacks.SpikeGuard` sets it.

        Assignment recompiles the train step. The optimizer state is kept. The next `compile` resets the value.
        """
        return self._core.configuration.options.spike_rule

    @spike_rule.setter
    def spike_rule(self, value: SpikeRule | None) -> None:
        if value != self.spike_rule:
            self._core.current_run.check_is_idle("Set `spike_rule`")
            self._core.configuration.set_spike_rule(value)
            self._core.state.take_over_rules()

    # --- the state -------------------------------------------------------------------------------------------------

    def build(self, sample: ArrayTree) -> None:
        """Makes the weights from the shapes of a sample.

        Args:
          sample: some rows of inputs `x`, as in `fit`: an array, a list of numbers, or a tuple or dict of these. An
            overridden `sample_inputs` receives it.

        Raises:
          ValueError: if `sample` holds no rows (for example, a shape), or the module cannot take such inputs.

        Example:
          >>> model.build(np.zeros((1, 28, 28)))  # doctest: +SKIP
          >>> model.build((images[:1], texts[:1]))  # for `__call__(self, image, text)`  # doctest: +SKIP
          >>> model.build({"image": images[:1], "text": texts[:1]})  # the same by name  # doctest: +SKIP
        """
        self._core.state.build(self.sample_inputs(_some_rows(sample)))

    @property
    def built(self) -> bool:
        """Whether the model has weights."""
        return self._core.state.is_built

    @property
    def state(self) -> TrainState:
        """The training state. Its arrays stay valid: the next train step works on a copy.

        Before the first update, optimizers that keep the first weights, or averages, begin with assigned parameters.
        Later, averages go on; `set_weights` starts them again.

        Raises:
          RuntimeError: if the model is not built.
          TypeError: in a function of `strategy.run`; pass the state as an argument instead.
        """
        return self._core.state.borrow()

    @state.setter
    def state(self, value: TrainState) -> None:
        self._core.state.assign(value)

    def state_shapes(self, sample: ArrayTree | None = None) -> TrainState:
        """Returns the shapes of the state without allocation.

        Args:
          sample: some rows of inputs `x`; needed if the model is not built.

        Raises:
          ValueError: if the model is not built, and there is no sample.
        """
        if self.built:
            return self._core.state.shapes()
        if sample is None:
            raise ValueError("The model is not built, so the shapes of its weights are not known. Pass `sample`, some "
                             "rows of inputs; nothing is allocated for it but its own rows.")
        return self._core.state.shapes(self.sample_inputs(_some_rows(sample)))

    def summary(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Prints a table of the layers, their output shapes, weights, bytes and floating-point operations.

        The operations are per row of inputs, for a forward pass. A column shows how a strategy splits parameters.
        Nothing is computed.

        Args:
          print_fn: called with each line of plain text; by default, the table is printed, in color on a terminal, or
            logged after `disable_interactive_logging`.

        Raises:
          RuntimeError: if the model is not built.
        """
        table = forward.table_of_layers(self._core, self.name)
        arguments.require_functions(print_fn=print_fn)
        lines = render_summary(*table)
        if print_fn is not None:
            for line in lines:
                print_fn(line)
        elif not is_interactive_logging_enabled():
            print_message("\n".join(lines))
        elif sys.stdout.isatty():
            print_summary(*table)
        else:
            print_table("\n".join(lines))

    def count_params(self) -> int:
        """Returns the number of scalar weights, including the model state (such as BatchNorm's running averages)."""
        return sum(leaf.size for leaf in weights_io.weights_of(self._core.state.current))

    @property
    def weights(self) -> list[ModelVariable]:
        """All weights, in the order of `get_weights`: the parameters, then the model state.

        The variables of the optimizer are in `model.optimizer.variables`.

        Raises:
          RuntimeError: if the model is not built.

        Example:
          >>> for weight in model.trainable_weights:  # doctest: +SKIP
          ...     print(weight.path, weight.shape)
        """
        return [variable for _, variable in weights_io.variables_of(
            self._core.state, self._core.configuration, self._core.module)]

    @property
    def trainable_weights(self) -> list[ModelVariable]:
        """The parameters that the default train step trains: without frozen parameters; empty if not `trainable`."""
        return [weight for weight in self.weights if weight.trainable]

    @property
    def non_trainable_weights(self) -> list[ModelVariable]:
        """The parameters that are not trained, and the model state, such as BatchNorm's running averages."""
        return [weight for weight in self.weights if not weight.trainable]

    variables, trainable_variables, non_trainable_variables = weights, trainable_weights, non_trainable_weights

    @property
    def layers(self) -> list[ModelLayer]:
        """The direct layers of the module, in the order of their calls; for named modules, the modules.

        Each layer has its own `layers`. The layers of a stack are known before the model is built; the layers of a
        Linen module are made when it is called.

        Raises:
          RuntimeError: if the module is a Linen module other than a stack, and not built.
        """
        return weights_io.layers_of(self._core.state, self._core.configuration, self._core.module)

    def get_layer(self, name: str | None = None, index: int | None = None) -> ModelLayer:
        """Returns a layer.

        Args:
          name: its path, such as "encoder" or "encoder/Dense_0"; `summary` shows the paths.
          index: its index in `layers`, instead of `name`.

        Raises:
          ValueError: if there is no such layer, or both or neither of `name` and `index` are given.
          RuntimeError: as in `layers`.

        Example:
          >>> model.get_layer("encoder").set_weights(weights)  # doctest: +SKIP
        """
        return find(self.layers, name, index)

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all weights: the parameters, then the model state."""
        return weights_io.get_weights(self._core.state)

    def set_weights(self, weights: Sequence[ArrayLike]) -> None:
        """Replaces all weights. Moving averages of `ema_decay` start again from the new weights.

        Args:
          weights: arrays in the order and with the shapes of `get_weights`.

        Raises:
          ValueError: if their number or a shape differs; nothing is replaced.
          TypeError: if they are not a list.
        """
        weights_io.set_weights(self._core.state, weights)

    def save_weights(self, filepath: Path, overwrite: bool = True) -> None:
        """Writes all weights to a single safetensors file, atomically.

        The metadata hold a SHA-256 of each array, which `load_weights` checks.

        The name of an array is its path: "Dense_0/kernel" for a parameter; paths of Linen's model state begin with the
        collection: "batch_stats/BatchNorm_0/mean". Arrays keep the model's stored dtypes. Arrays that are split over
        devices are whole in the file, and are fetched one at a time. With `ema_decay`, the file has the
        averages, which `evaluate`, `predict` and `export` use; `save` keeps the averages and the weights.

        If several JAX processes train together, all must call this method; the first process writes.

        Args:
          filepath: the file, such as "digits.safetensors", in an existing folder.
          overwrite: whether to replace an existing file.

        Raises:
          RuntimeError: if the model is not built.
          FileExistsError: if the file exists and `overwrite` is False.
          FileNotFoundError: if there is no such folder.
          ValueError: if two weights have the same name, if safetensors lacks a dtype, or if the suffix belongs to
            another format, such as ".h5".
          TypeError: if `filepath` is not a path.

        Example:
          >>> model.save_weights("digits.safetensors")  # doctest: +SKIP

        Source: `keras.Model.save_weights`; the format is https://github.com/huggingface/safetensors.
        """
        arguments.require_bool(overwrite=overwrite)
        weights_io.save_weights(self._core.state, filepath, overwrite)

    def load_weights(self, filepath: Path, patterns: Sequence[str] | None = None, partial: bool = False,
                     part: str | None = None) -> MatchReport:
        """Replaces weights by weights from a file, matched by name; see `save_weights` for the names.

        Arrays are processed one at a time: read, cast to the model's dtype and sent to the devices, each of which gets
        its shard. Moving averages of `ema_decay` start again from the loaded weights. The optimizer state and the step
        are kept. If anything is rejected, nothing changes.

        Args:
          filepath: a safetensors file, written by `save_weights` or by another program with the same names.
          patterns: regular expressions over whole path segments, such as `["encoder", "head/bias"]`: only weights that
            match any of them are loaded. `["^(?!head/).*"]` loads all but a layer "head". None loads all weights.
          partial: whether weights may be missing from the file, or arrays of the file from the model.
          part: path of the submodule that the file is of, such as "backbone" for the file of a model that is a part of
            this model; None for the whole model.

        Returns:
          A report of the arrays that were loaded and of all others.

        Raises:
          RuntimeError: if the model is not built.
          FileNotFoundError: if there is no such file; the message lists files with similar names.
          IsADirectoryError: if it is a folder, such as a checkpoint.
          ValueError: if the file is not a safetensors file or is damaged, if a shape or a kind of dtype differs, if
            numbers do not fit the model's dtypes, if names do not match, unless `partial`, or if a pattern matches
            nothing.
          TypeError: if `filepath` is not a path, or `patterns` is not a list of strings.

        Example:
          >>> print(model.load_weights("digits.safetensors", ["encoder"]))  # doctest: +SKIP
          12 arrays match.

        Source: `keras.Model.load_weights`.
        """
        arguments.require_bool(partial=partial)
        return weights_io.load_weights(self._core.state, filepath, patterns, partial, part=part)

    def save(self, filepath: Path, overwrite: bool = True) -> None:
        """Writes the training state: weights, optimizer, step and seed. `trainer.load` loads it.

        Writing is atomic. Checksums let `trainer.load` reject a damaged file. All processes must call this method.

        Args:
          filepath: a safetensors file, if the name has a suffix, such as "digits.safetensors"; else a folder, which
            several processes and large models need.
          overwrite: whether to replace an existing file or folder.

        Raises:
          RuntimeError: if the model is not built.
          FileExistsError: if the path exists, and `overwrite` is False or the content is not a checkpoint.
          OSError: if writing fails. The previous content is kept.
          ValueError: if the suffix belongs to another format, such as ".keras".
          TypeError: if `filepath` is not a path.

        Example:
          >>> model.save("digits")  # doctest: +SKIP

        Source: `keras.Model.save`.
        """
        path = checked_path("filepath", filepath)
        check_suffix("filepath", path, ".safetensors", or_folder=True)
        state = self._core.state.current
        arguments.require_bool(overwrite=overwrite)
        weights_io.check_may_write(path, overwrite)
        saved_model.save(path, state, self._core.state.inputs)

    def export(self, filepath: Path, *, format: Literal["jax", "stablehlo", "saved_model", "onnx"] = "jax",
               batch_size: int | None = None, platforms: Sequence[str] | None = None,
               sample: ArrayTree | None = None) -> None:
        """Writes the computation of `predict`, with the weights, for programs without the model's code.

        As in `predict`, moving averages of `ema_decay` are used as the weights. The computation is for a single device,
        whatever the model's strategy; the weights are gathered on the host. An existing file or folder is replaced
        atomically. All JAX processes must call this method; the first writes. See docs/export.md.

        Args:
          filepath: the file, such as "digits.export", in an existing folder; a folder for "stablehlo" and
            "saved_model"; a file with the suffix ".onnx" for "onnx".
          format: "jax" writes a file for `trainer.load_exported`; "stablehlo" a program for other compilers, its
            signature and the weights; "saved_model" a SavedModel for TensorFlow (`pip install
            'trainer-jax[tensorflow]'`); "onnx" a file for ONNX runtimes (`[onnx]`), which is first compared with the
            model on random rows.
          batch_size: rows per batch, for models that cannot be exported for any number of rows; None for any number.
          platforms: the target platforms: "cpu", "cuda", "rocm" and "tpu"; by default JAX's current platform, and for
            the format "jax" also "cpu". ONNX runs on any platform.
          sample: some rows of inputs `x`; by default, the inputs that the model was built on.

        Raises:
          RuntimeError: if the model is not built.
          ValueError: if the model cannot be exported in this way, an argument is invalid, the suffix belongs to another
            format, or `sample_inputs` is overridden and there is no `sample`.
          TypeError: if inputs or outputs are in containers other than dicts, lists and tuples.
          FileNotFoundError: if there is no such folder.
          FileExistsError: if there is a folder with other content.
          ImportError: if a package for the format is not installed.

        Example:
          >>> model.export("digits.export")  # doctest: +SKIP
          >>> trainer.load_exported("digits.export").predict(images)  # doctest: +SKIP

        Source: `keras.Model.export`; the program is `jax.export`'s.
        """
        state = self._core.state.current
        path = checked_path("filepath", filepath)
        formats.check(format, path)
        arguments.check_count("batch_size", batch_size, 1, optional=True)
        if sample is None and self._core.overrides("sample_inputs"):
            raise ValueError("The model overrides `sample_inputs`, so the inputs of its `predict_step` are unknown. "
                             "Pass `sample`, some rows of `x` as `predict` takes them.")
        inputs = self._core.state.inputs if sample is None else unpack_x_y_sample_weight(_some_rows(sample))[0]
        # Moves all arrays to device memory: devices cannot compute in host memory spaces.
        averaged = self.strategy.on_devices(state).averaged()
        formats.save(format, path, self.predict_step, averaged, inputs, batch_size, platforms)


def _is_compiled(name: str) -> AttributeError:
    return AttributeError(f"`{name}` of a model is what `compile` was given, and cannot be set: the steps are compiled "
                          f"with it. Call `compile(..., {name}=...)`. An attribute of your own needs another name.")


def _as_number(result: Any) -> Any:
    is_value = isinstance(result, (jax.Array, np.generic)) and not isinstance(result, jax.core.Tracer)
    return float(result) if is_value and np.ndim(result) == 0 else result
