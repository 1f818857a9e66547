"""`Model` and `Sequential`, with Keras's interface.

Owns the public methods that compile and run a model. The steps are in `overridable_steps.py`, the state and the weights
in `stateful_model.py`, and the work is done in the core.
"""

from __future__ import annotations

import datetime
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from trainer.callbacks import History
from trainer.core import arguments, errors
from trainer.core.calls.callers import unpacks_the_result
from trainer.core.calls.entry_points import with_entry_points
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.modules import EmptyStack, as_functional
from trainer.core.modules.remat_policies import RematPolicy
from trainer.core.timing import Timing
from trainer.core.types import ArrayTree, Data, Shuffle, Verbose
from trainer.engine.loop import loop
from trainer.engine.loop.resumable_run import RunLimits
from trainer.engine.model import inputs
from trainer.engine.model.run_description import describe_run
from trainer.engine.model.stateful_model import StatefulModel
from trainer.engine.model.types import Auto, Callbacks, Layer, Losses, LossWeights, Metrics, Optimizers, Precision
from trainer.engine.step.compile_options import CompileOptions
from trainer.engine.step.output_matching import collect
from trainer.optimizers.attached_optimizer import AttachedOptimizer
from trainer.regularizers import Penalty


@with_entry_points
class Model(StatefulModel):
    """Trains, evaluates and predicts with a Flax module, on the devices of the strategy in scope.

    Args:
      module: a Linen module, an NNX module, or a dict of named modules.
      seed: seed of the initial weights, shuffling, dropout and all other random streams; by default the seed of
        `trainer.utils.set_random_seed`, or 0.
      name: a name for messages and tables; by default the module's name.
      train_kwargs: keyword arguments of the module's call in training, such as `{"mode": "train"}`. They take
        precedence over the flags and keys that are passed automatically (see docs/modules_and_steps.md). For named
        modules, a dict of such dicts by name.
      eval_kwargs: keyword arguments of all other calls.
      eval_module: a module with the same parameters for all calls outside of training. Use it for modules whose
        attributes control dropout and BatchNorm. For named modules, a dict of modules, which may be partial.

    Attributes:
      module: the module as given.
      strategy: the strategy in whose scope the model was made.
      stop_training: set to True, for example in a callback, to end `fit` after the current batch.
      stop_evaluating, stop_predicting: the same for `evaluate` and `predict`.
      history: the `History` of the last `fit`.

    Raises:
      TypeError: if `module` is not a Flax module, or an argument has a wrong type.
      ValueError: if the module's call lacks a parameter that `train_kwargs` or `eval_kwargs` names.

    Example:
      >>> import numpy as np
      >>> from flax import linen as nn
      >>> model = Model(nn.Dense(1))
      >>> model.compile("sgd", "mse")
      >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
      >>> sorted(model.evaluate(np.ones((8, 2)), np.ones((8, 1)), verbose=0))
      ['loss']
    """

    history: History | None = None

    # --- compiling -------------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Optimizers | None = "rmsprop",
        loss: Losses | None = None,
        loss_weights: LossWeights | None = None,
        metrics: Metrics = None,
        weighted_metrics: Metrics = None,
        run_eagerly: bool = False,
        steps_per_execution: int | Auto = "auto",
        jit_compile: bool | Auto = "auto",
        *,
        batch_norm: Literal["global", "per_replica"] = "global",
        microbatches: int = 1,
        precision: Precision | None = None,
        remat: bool | str | Callable[..., Any] = False,
        ema_decay: float | None = None,
        freeze: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
        data_on_device: bool | Auto = "auto",
        compile_guard: Literal["warn", "error", "off"] | int = "warn",
        skip_non_finite: bool = False,
        log_norms: bool = False,
        regularizers: Mapping[str, str | Penalty] | None = None,
        deterministic: bool = False,
        matmul_precision: Literal["default", "high", "highest"] | None = None,
    ) -> None:
        """Configures training. Existing weights are kept; the optimizer state is reset.

        Args:
          optimizer: a Keras name, an optimizer of `trainer.optimizers`, an optax transformation, which gets the
            loss too if it asks for it, or a dict of these by module name: the names of a dict of modules, or of the
            top-level submodules of a single module.
          loss: a Keras name, a loss of `trainer.losses`, a function `(y_true, y_pred)` that returns one value per row
            (or one number for the batch), or, for several outputs, a list or dict of these. None if `compute_loss` or
            `train_step` is overridden, or if the module sows the whole loss.
          loss_weights: factors of the outputs' losses, a list or dict like `loss`.
          metrics: names, metrics of `trainer.metrics`, clu, metrax or `nnx.metrics`, or functions like `loss`: a list,
            or a dict by output name.
          weighted_metrics: the same, for metrics that use sample weights.
          run_eagerly: whether to run steps uncompiled, to debug with prints and breakpoints.
          steps_per_execution: number of steps per execution. "auto" decides by the cost of a step. Callbacks with
            per-batch hooks still see every batch.
          jit_compile: False is the same as `run_eagerly=True`.
          batch_norm: "global" computes BatchNorm's statistics over the whole batch; "per_replica" over the rows of each
            replica, and averages the running averages over the replicas.
          microbatches: number of microbatches per batch, for gradient accumulation, which saves memory. Each
            microbatch is spread over all devices. There is a single update per batch, with the results of the whole
            batch, except that operations across rows, such as BatchNorm, see a single microbatch at a time. An
            overridden `train_step` cannot be combined with this argument.
          precision: mixed precision. "mixed_bfloat16" and "mixed_float16" compute in 16 bits, with weights, outputs
            and losses in float32; "bfloat16" also stores weights in 16 bits. float16 has a dynamic loss scale: a step
            whose gradients overflow is skipped, and counted in the log "skipped_steps". None computes in the module's
            own dtypes.
          remat: whether to use activation checkpointing: activations inside of layers are recomputed for the
            gradients, which saves memory for a second forward pass. The layers are usually the layers or blocks that
            the module calls. A policy of `jax.checkpoint_policies`, by name or as a function, says which values inside
            of them are kept: "dots_with_no_batch_dims_saveable" keeps products with weights, "dots_saveable" all
            products, "offload_dot_with_no_batch_dims" moves the former to the memory of the host. True keeps nothing,
            as "nothing_saveable" does. The results are the same.
          ema_decay: decay, such as 0.999, of a moving average of the weights, which `evaluate` and `predict` then use.
            As in Keras, the first update initializes the average.
          freeze: a path pattern, or several, of parameters that are not trained, such as "encoder" or "dense.*/bias":
            regular expressions over whole segments of paths such as "encoder/Dense_0/kernel". "^(?!head/).*" freezes
            all but a layer "head". As in Keras, a BatchNorm whose parameters are all frozen normalizes by its running
            averages in training too, and does not update them. For NNX modules also filters, such as
            `nnx.Not(nnx.LoRAParam)` or `nnx.PathContains("encoder")`.
          data_on_device: whether to place arrays, and `Dataset`s over arrays without `map`, on the devices once, and
            gather batches there. "auto" does so on accelerators for data that `fit` reads more than once and that fit
            into an eighth of a device's memory: each device holds all of the data, or its shard of the data if only
            the shard fits. The data are placed once for all fits, until they are written to. Data of the last `fit`
            stay on the devices as long as the arrays exist, if all resident data fit into a quarter of the memory.
            True does so for the training data of `fit`, regardless of size.
          compile_guard: the reaction to a step that keeps recompiling for new batch shapes: "warn", "error" or "off";
            or the number of shapes after which to warn. Data of `trainer.data.bucketed` declare their number of shapes.
          skip_non_finite: whether to skip updates with non-finite gradients: parameters, optimizer state and model
            state stay unchanged. The log "skipped_steps" counts skipped updates, and "skipped_in_a_row" is the largest
            number in a row. The loss scale of float16 does this in any case.
          log_norms: whether to log L2 norms of each update: "grad_norm" of the gradients, before the optimizer clips
            them, "update_norm" of its change of the parameters, and "param_norm" of the trained parameters after it;
            and the same by top-level module, such as "grad_norm/encoder", which the progress bar leaves out. Like other
            logs, they are means over the steps of an epoch, and no step waits for them.
          regularizers: penalties of weights, by path patterns like the patterns of `freeze`: `{"**/kernel":
            trainer.regularizers.L2(1e-4)}`. As in Keras, they are part of the loss, of its gradient and of the loss
            that `evaluate` returns. A custom `train_step` adds `self.compute_penalties(params, model_state)` to its
            loss.
          deterministic: whether `fit`, `evaluate` and `predict` give the same bits in each run on devices of the same
            kind. CPUs always do. On GPUs, XLA then uses no kernel with a varying order of additions and no autotuning,
            so steps may be slower. See docs/resume.md.
          matmul_precision: precision of float32 matrix multiplications, by JAX's names: "highest" uses float32;
            "default" and "high" use TF32, with 10 mantissa bits, on NVIDIA GPUs from Ampere on. It applies to steps, to
            `model(x)`, to `export`, and to the module in custom loops that call `apply`. A layer's own `precision`
            takes precedence. None uses JAX's configuration.

        Raises:
          ValueError: for unknown names and invalid values.
          TypeError: for arguments of a wrong type.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        core = self._core
        core.check_scope()
        core.current_run.check_is_idle("Call `compile`")
        options = CompileOptions.checked(
            steps_per_execution=steps_per_execution, run_eagerly=run_eagerly, jit_compile=jit_compile,
            microbatches=microbatches, precision_name=precision, batch_norm=batch_norm, remat=remat,
            ema_decay=ema_decay, freeze=freeze, module=core.module,
            data_on_device=data_on_device, guard_mode=compile_guard, skip_non_finite=skip_non_finite,
            log_norms=log_norms, penalties=regularizers, deterministic=deterministic, matmul_precision=matmul_precision)
        if isinstance(options.remat, RematPolicy) and not core.strategy.is_described:
            options.remat.check_memories(core.strategy.mesh.local_devices)
        if options.microbatches > 1 and core.overrides("train_step"):
            raise ValueError("`microbatches` divides the batches of the default `train_step`, but this model overrides "
                             "it. Override `compute_loss` instead, or divide the batch in the overridden step.")
        params = core.state.state_or_shapes.params if self.built else None
        core.configuration.compile(
            optimizer, loss, loss_weights, metrics, weighted_metrics, options, core.module, params)
        core.configuration.given = given
        core.state.start_training_again()

    @property
    def optimizer(self) -> Any:
        """The optimizer, whose learning rate can be read and set; a dict of optimizers for named modules.

        Assignment is the same as `compile` with another optimizer and otherwise the same arguments: the weights are
        kept, and the optimizer state is reset.

        Raises:
          RuntimeError: on assignment before `compile`, or while the model is running.
        """
        return self._core.state.attached_optimizer()

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._core.checked("model.optimizer = ...")
        self.compile(**{**self._core.configuration.given, "optimizer": _detached(value)})

    # --- running ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        x: Data | None = None,
        y: ArrayTree | None = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Callbacks | None = None,
        validation_split: float = 0.0,
        validation_data: Data | None = None,
        shuffle: Shuffle = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: ArrayTree | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        max_steps: int | None = None,
        max_time: float | datetime.timedelta | None = None,
        limit_batches: int | None = None,
    ) -> History:
        """Trains the model.

        Args:
          x: inputs: an array, or a tuple or dict of arrays, rows first; or a `trainer.data.Dataset`, a generator, a
            Grain dataset, or any other iterable of batches `(x, y)` or `(x, y, sample_weight)`, such as a list of
            batches. A list of arrays is several inputs. For tables see `trainer.data.Dataset.from_columns`. If a
            callback writes to the arrays, the effect on `fit` is undefined, because they may already be on the devices.
          y: targets, if `x` is arrays.
          batch_size: rows per batch over all replicas, if `x` is arrays; by default the size that gives
            `steps_per_epoch` batches, or 32. The last batch of an epoch may be smaller; logs weight it by its rows.
          epochs: the total number of epochs, including the epochs before `initial_epoch`.
          verbose: 0 is silent, 1 a progress bar (a line per epoch outside of a terminal), 2 a line per epoch, "auto" 1.
          callbacks: callbacks, or a list of callbacks.
          validation_split: the fraction of the arrays, taken from their end before shuffling, to validate on.
          validation_data: `(x, y)`, `(x, y, sample_weight)`, or an iterable of batches, to validate on; or a dict of
            several such sets, `{"clean": (x, y), "noisy": dataset}`, with logs such as `val_clean_loss`. A dict of
            arrays is a single set: named inputs, without targets.
          shuffle: whether to read arrays in a new order in each epoch, which follows from the seed and the epoch's
            number; "batch" keeps the rows of a batch together. In a loop over `fit`, pass the epoch's number: `fit(...,
            initial_epoch=epoch, epochs=epoch + 1)`.
          class_weight: weights of rows by their label.
          sample_weight: weights of rows, if `x` is arrays.
          initial_epoch: the index of the first epoch, from 0.
          steps_per_epoch: maximum number of batches per epoch; by default all of `x`. As in Keras, each epoch takes the
            next batches of a pass over `x`. When the pass ends early, the epoch ends with a warning, and the next epoch
            starts another pass. A generator has a single pass, and its end ends the training. To read beyond the end,
            pass an endless `trainer.data.Dataset` (by `repeat()`) or an endless generator. With `initial_epoch`, data
            other than arrays and generators are first read up to that epoch.
          validation_steps: maximum number of batches per validation; by default all. Each validation starts from the
            first batch, except that a generator continues where the last validation stopped, and must have enough
            batches for all validations. Data with fewer batches are used whole, with a warning.
          validation_batch_size: like `batch_size`, for validation; by default `batch_size`.
          validation_freq: number of epochs between validations, or a list of epochs to validate after, counted from 1.
          max_steps: maximum number of batches to train on in total, including batches before an interruption; `epochs`
            may end the run earlier. As with `stop_training`, the epoch ends there, with its validation.
            `BackupAndRestore` saves the state before that end: the same `fit` with more steps, or without `max_steps`,
            continues exactly.
          max_time: seconds, or a `datetime.timedelta`, after which this call ends in the same way, such as the time
            limit of a job. With either limit, data may be endless: the epoch ends there.
          limit_batches: maximum number of batches per epoch and per validation, for a dry run of the whole run:
            `fit(..., epochs=2, limit_batches=2)`.

        Returns:
          The `History`, whose `history` has a list of floats per log.

        Raises:
          RuntimeError: if the model is not compiled, or the data pipeline fails; the message names the batch.
          ValueError: for invalid data and arguments, before the train step compiles.
          TypeError: for arguments of a wrong type.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        core, timing = self._core.checked("fit"), Timing()
        if np.ndim(batch_size) or np.ndim(epochs):  # type: ignore[arg-type]
            raise TypeError("`batch_size` and `epochs` are numbers. Received: arrays, as the third or fourth argument. "
                            "Data for validation have a name: `fit(x, y, validation_data=(x_val, y_val))`.")
        arguments.as_count("epochs", epochs, 0)
        arguments.as_count("initial_epoch", initial_epoch, 0)
        if 0 < epochs <= initial_epoch:
            warnings.warn(f"`fit` trains no epoch: initial_epoch={initial_epoch} is not below epochs={epochs}, the "
                          "total number of epochs, earlier ones included.", stacklevel=user_stacklevel())
        arguments.check_counts(1, optional=True, max_steps=max_steps, limit_batches=limit_batches,
                               steps_per_epoch=steps_per_epoch, validation_steps=validation_steps,
                               validation_batch_size=validation_batch_size)
        limits = RunLimits(max_steps, max_time)
        arguments.check_validation_freq(validation_freq)
        with inputs.training_readers(
            core, x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, class_weight=class_weight,
            steps_per_epoch=steps_per_epoch, initial_epoch=initial_epoch, validation_split=validation_split,
            validation_data=validation_data, validation_steps=validation_steps,
            validation_batch_size=validation_batch_size, limit_batches=limit_batches,
            may_be_endless=limits.are_given,
        ) as (reader, validation):
            called = inputs.callback_list(
                self, callbacks, verbose, of_fit=True, epochs=epochs, steps=reader.num_batches)
            history = next(callback for callback in called.callbacks if isinstance(callback, History))
            describe = functools.partial(describe_run, self, Model.compile, Model.fit, given, reader, validation)
            try:
                with core.current_run.described(describe):
                    loop.fit(core, reader, called, epochs, initial_epoch, validation, validation_freq, timing, limits)
            finally:
                called.release()
                core.state.end_fit()
                history.timing = timing.report()
                self.history = history  # a callback may also have called `fit`
        return history

    def compile_ahead(
        self,
        sample: Data,
        batch_size: int | None = None,
        epochs: int | None = None,
        phases: str | Sequence[str] = ("train",),
        steps_per_epoch: int | None = None,
    ) -> float:
        """Compiles the steps of a later `fit`, `evaluate` or `predict`, and builds the model.

        For arrays and `Dataset`s, this includes a shorter last batch. For other data, a shorter batch compiles on
        arrival.

        Args:
          sample: the data of the later call: a batched `Dataset` or another iterable of batches that can be iterated
            again, or arrays `(x, y)` or `(x, y, sample_weight)`; for `predict` also only `x`, unless it is a tuple.
          batch_size: rows per batch, if `sample` is all rows of arrays; by default, the arrays are a single batch.
          epochs: number of passes over the data, such as the epochs of `fit`. Data read more than once may be kept on
            the devices; see `data_on_device` of `compile`. `predict`, and `evaluate` outside of `fit`, read data once.
            None means more than once.
          phases: the steps to compile: "train", "test" and "predict".
          steps_per_epoch: the later `steps_per_epoch`, `validation_steps` or `steps`: an epoch of few batches compiles
            differently. If `sample` is a single batch of data with a length, pass that length.

        Returns:
          The elapsed seconds.

        Raises:
          As `fit` does; also ValueError for an unknown phase, or for data that can be read only once.

        Example:
          >>> model.compile_ahead((x, y), batch_size=64)  # doctest: +SKIP
        """
        arguments.check_counts(1, optional=True, epochs=epochs, steps_per_epoch=steps_per_epoch)
        kinds = inputs.checked_phases(phases)
        core = self._core.checked("compile_ahead", must_be_compiled=any(kind != "predict" for kind in kinds))
        begin = time.perf_counter()
        inputs.compile_ahead(core, sample, batch_size, epochs, kinds, steps_per_epoch)
        _ = core.state.current  # waits for pending weights
        return time.perf_counter() - begin

    # With `return_dict=False`, the result is a single value or a list, by the number of metrics.
    @overload
    def evaluate(
        self, x: Data | None = ..., y: ArrayTree | None = ..., batch_size: int | None = ..., verbose: Verbose = ...,
        sample_weight: ArrayTree | None = ..., steps: int | None = ..., callbacks: Callbacks | None = ...,
        return_dict: Literal[True] = ...) -> dict[str, float]: ...
    @overload
    def evaluate(
        self, x: Data | None = ..., y: ArrayTree | None = ..., batch_size: int | None = ..., verbose: Verbose = ...,
        sample_weight: ArrayTree | None = ..., steps: int | None = ..., callbacks: Callbacks | None = ...,
        *, return_dict: bool) -> Any: ...
    def evaluate(
        self,
        x: Data | None = None,
        y: ArrayTree | None = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: ArrayTree | None = None,
        steps: int | None = None,
        callbacks: Callbacks | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the loss and the metrics over all rows of the data, exactly.

        A loss that divides by sample weights, or ignores labels by `ignore_class`, has the value of a single batch of
        all rows, for any `batch_size`. Keras, and the training logs of `fit`, use the mean over batches, weighted by
        rows.

        Args:
          x: inputs, as in `fit`; or a dict of sets by name, as `validation_data` of `fit`, evaluated in turn.
          y: targets, if `x` is arrays.
          batch_size: rows per batch, if `x` is arrays; 32 by default.
          verbose: as in `fit`.
          sample_weight: weights of rows, if `x` is arrays.
          steps: maximum number of batches; by default all. Data with fewer batches are used whole, with a warning.
          callbacks: callbacks, or a list of callbacks.
          return_dict: False returns Keras's list, or only the loss if there are no metrics.

        Raises:
          TypeError: if the caller unpacks the dict, as in `loss, accuracy = model.evaluate(x, y)`.
          As `fit` does.
        """
        core = self._core.checked("evaluate")
        arguments.require_bool(return_dict=return_dict)
        if return_dict and unpacks_the_result():
            raise TypeError("`evaluate` returns a dict, such as `{\"loss\": 0.5}`: unpacked, it would give the names. "
                            "For Keras's list: `evaluate(..., return_dict=False)`. For the dict: `logs = "
                            "model.evaluate(...)`, then `logs[\"loss\"]`.")
        with (inputs.evaluation_readers(core, x, y, sample_weight, batch_size, steps) as readers,
              inputs.callback_list(self, callbacks, verbose, epochs=1, steps=inputs.common_steps(readers)) as called):
            logs = loop.evaluate(core, readers, called)
        if return_dict:
            return logs
        return inputs.as_list(self, logs) if "" in readers else list(logs.values())

    def predict(
        self,
        x: Data,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks | None = None,
    ) -> Any:
        """Returns the outputs for all rows as numpy arrays, in input order.

        Outputs move to the host as they are computed, so the device needs memory for a few batches only.

        Args:
          x: inputs, as in `fit`; targets in batches are ignored.
          batch_size: rows per batch, if `x` is arrays; 32 by default.
          verbose: as in `fit`.
          steps: maximum number of batches; by default all. Data with fewer batches are used whole, with a warning.
          callbacks: callbacks, or a list of callbacks.

        Raises:
          As `fit` does, but the model need not be compiled.
        """
        core = self._core.checked("predict", must_be_compiled=False)
        with (inputs.single_reader(core, "predict", x, batch_size=batch_size, steps=steps) as reader,
              inputs.callback_list(self, callbacks, verbose, epochs=1, steps=reader.num_batches) as called):
            return collect(loop.predict(core, reader, called), reader.epoch_rows)

    def predict_iter(self, x: Data, batch_size: int | None = None, steps: int | None = None,
                     callbacks: Callbacks | None = None) -> Iterator[Any]:
        """Yields the outputs of `predict` batch by batch, for results that do not fit into memory, or endless data."""
        core = self._core.checked("predict", must_be_compiled=False)
        reader = inputs.single_reader(core, "predict", x, batch_size=batch_size, steps=steps, may_be_endless=True)
        with reader, inputs.callback_list(self, callbacks, 0, epochs=1, steps=reader.num_batches) as called:
            yield from loop.predict(core, reader, called)

    @overload
    def train_on_batch(
        self, x: ArrayTree, y: ArrayTree | None = ..., sample_weight: ArrayTree | None = ...,
        class_weight: dict[int, float] | None = ..., *, return_dict: Literal[True]) -> dict[str, float]: ...
    @overload
    def train_on_batch(
        self, x: ArrayTree, y: ArrayTree | None = ..., sample_weight: ArrayTree | None = ...,
        class_weight: dict[int, float] | None = ..., return_dict: bool = ...) -> Any: ...
    def train_on_batch(
        self, x: ArrayTree, y: ArrayTree | None = None, sample_weight: ArrayTree | None = None,
        class_weight: dict[int, float] | None = None, return_dict: bool = False,
    ) -> Any:
        """Trains on a single batch and returns its logs, as Keras's list or as a dict."""
        core = self._core.checked("train_on_batch")
        arguments.require_bool(return_dict=return_dict)
        with inputs.batch_reader(core, x, y, sample_weight, class_weight) as reader:
            logs = loop.run_on_batch(core, "train", reader)
        return logs if return_dict else inputs.as_list(self, logs)

    @overload
    def test_on_batch(self, x: ArrayTree, y: ArrayTree | None = ..., sample_weight: ArrayTree | None = ...,
                      *, return_dict: Literal[True]) -> dict[str, float]: ...
    @overload
    def test_on_batch(self, x: ArrayTree, y: ArrayTree | None = ..., sample_weight: ArrayTree | None = ...,
                      return_dict: bool = ...) -> Any: ...
    def test_on_batch(self, x: ArrayTree, y: ArrayTree | None = None, sample_weight: ArrayTree | None = None,
                      return_dict: bool = False) -> Any:
        """Evaluates a single batch and returns its logs, as Keras's list or as a dict."""
        core = self._core.checked("test_on_batch")
        arguments.require_bool(return_dict=return_dict)
        with inputs.batch_reader(core, x, y, sample_weight) as reader:
            logs = loop.run_on_batch(core, "test", reader)
        return logs if return_dict else inputs.as_list(self, logs)

    def predict_on_batch(self, x: ArrayTree) -> Any:
        """Returns the outputs for a single batch as numpy arrays."""
        return self.predict(x, batch_size=inputs.number_of_rows(x), verbose=0)

    def validate(self) -> dict[str, float]:
        """Returns the logs of all sets in the `validation_data` of the running `fit`, without the prefix "val_".

        Raises:
          ValueError: without validation data.
        """
        if self._core.current_run.validator is None:
            raise ValueError("There is nothing to validate on: call `validate` from a callback of a `fit` that has "
                             "`validation_data`, or `evaluate` with data.")
        return self._core.current_run.validator()


def _detached(optimizer: Any) -> Any:
    """Returns the optimizer of an attached optimizer, of this model or another; other values unchanged."""
    if isinstance(optimizer, Mapping):
        return {name: _detached(part) for name, part in optimizer.items()}
    return optimizer.optimizer if isinstance(optimizer, AttachedOptimizer) else optimizer


class Sequential(Model):
    """A model of layers applied one after another.

    Args:
      layers: Flax layers and functions, such as `[nn.Dense(16), nn.relu, nn.Dense(10)]`; None for no layers yet.
      seed, name: as in `Model`.

    Attributes:
      module: the layers as given.

    Raises:
      TypeError: if a layer is neither a Flax module nor a function.
    """

    if not TYPE_CHECKING:  # type checkers know the constructor

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 and cls.__init__ is Sequential.__init__:
                raise TypeError(f"`{cls.__name__}` takes a list of layers. Received: {len(args)} arguments. Write "
                                f"`{cls.__name__}([first, second])`.")
            return super().__new__(cls)

    def __init__(self, layers: Sequence[Layer] | None = None, *, seed: int | None = None, name: str | None = None):
        if layers is not None and not isinstance(layers, (list, tuple)):
            raise errors.wrong_type("layers", layers, "a list of Flax layers and functions")
        stack: Any = list(layers or []) or EmptyStack()
        super().__init__(stack, seed=seed, name=name or "sequential")
        self.module: list[Layer] = list(layers or [])

    def add(self, layer: Layer) -> None:
        """Appends a layer, before the model is built.

        Raises:
          RuntimeError: if the model is built.
          TypeError: if the layer is neither a Flax module nor a function.
        """
        self._take_over([*self.module, layer])

    def pop(self) -> Layer:
        """Removes the last layer, before the model is built, and returns it.

        Raises:
          RuntimeError: if the model is built.
          IndexError: if there are no layers.
        """
        if not self.module:
            raise IndexError("The model has no layers to remove.")
        *layers, last = self.module
        self._take_over(layers)
        return last

    def _take_over(self, layers: list[Layer]) -> None:
        self._core.exchange_module(as_functional(layers or EmptyStack()))
        self.module = layers
