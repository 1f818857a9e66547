"""CompiledModel: a built model and its compile options; what the loop trains.

Owns what a step computes by default, and when phases are traced. How a step runs on a mesh is in `step.py` and
`phase.py`, when it runs in `loop.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from trainer.cluster.process_group import check_alike
from trainer.compile.jit import is_jit_disabled, run_once
from trainer.core import replica_context
from trainer.core.precision import apply_with_policy
from trainer.core.replica_context import get_replica_context
from trainer.core.rng import stream_key
from trainer.core.train_state import TrainState
from trainer.data import Reader, unpack_x_y_sample_weight
from trainer.loop.run_fingerprint import describe_model, describe_step
from trainer.model.built_model import BuiltModel, first_rows
from trainer.optimizers import Optimizer
from trainer.optimizers.attached_optimizer import AttachedOptimizer
from trainer.optimizers.named import NamedRules
from trainer.step import output_checks
from trainer.step.compile_options import CompileOptions
from trainer.step.compiled_loss import CompiledLoss
from trainer.step.compiled_metrics import CompiledMetrics
from trainer.step.compiled_phase import CompiledPhase
from trainer.step.gradient_accumulation import accumulated
from trainer.step.update_rules import check_names, make_update_rules, with_options

_METHODS = {"train": "fit", "test": "evaluate", "predict": "predict"}  # that run a phase, for messages


class CompiledModel(BuiltModel):
    """A built model with a loss, metrics and an optimizer. See `Model`, which adds `fit` and the rest."""

    def __init__(self, module: Any, *, seed: int = 0, name: str | None = None):
        super().__init__(module, seed=seed, name=name)
        self.stop_training = self.stop_evaluating = self.stop_predicting = False
        self.validator: Callable[[], dict[str, Any]] | None = None
        self._trainable = True
        self._is_compiled = False
        self._loss, self._metrics = CompiledLoss(None), CompiledMetrics()
        self._reset_phases()

    # --- compiling -------------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int | str = "auto",
        jit_compile: bool | str = "auto",
        *,
        batch_norm: str = "global",
        microbatches: int = 1,
        precision: Any = None,
        remat: bool = False,
        ema_decay: float | None = None,
        freeze: Any = None,
        data_on_device: bool | str = "auto",
        compile_guard: str = "warn",
        skip_non_finite: bool = False,
    ) -> None:
        """Says how to train. Weights that exist already are kept; the optimizer starts anew.

        Args:
          optimizer: a Keras name, an optimizer of `trainer.optimizers`, an optax transformation of gradients and
            parameters, or a dict of these by module name: the names of a dict of modules, or of the top-level
            submodules of one module.
          loss: a Keras name, a loss of `trainer.losses`, a function `(y_true, y_pred)` that returns one value per row
            (or the mean over the rows), or, for several outputs, a list or dict of these. None if `compute_loss` or
            `train_step` is overridden.
          loss_weights: factors of the outputs' losses, a list or dict like `loss`.
          metrics: names, metrics of `trainer.metrics`, or functions like `loss`: a list, or a dict by output name.
          weighted_metrics: the same, for metrics that use sample weights.
          run_eagerly: run steps uncompiled, as one replica, to debug with prints and breakpoints.
          steps_per_execution: how many steps go into one execution. "auto" decides by the cost of a step. Callbacks
            that override per-batch hooks see every batch all the same.
          jit_compile: False is the same as `run_eagerly`.
          batch_norm: "global" takes BatchNorm's statistics over the whole batch, as one device would; "per_replica"
            over each replica's rows, and averages the running averages over the replicas.
          microbatches: in how many parts each replica computes its rows of a batch, one after another, to need less
            memory. There is one update per batch, and the numbers are those of the whole batch; only BatchNorm sees
            the microbatches. An overridden `train_step` decides for itself, so it cannot be used with this.
          precision: "mixed_bfloat16" and "mixed_float16" compute in 16 bits, with weights, outputs and losses in
            float32; "bfloat16" stores weights in 16 bits too. float16 has a dynamic loss scale: a step whose gradients
            overflow is skipped, and counted in the log "skipped_steps". None computes in the module's own dtypes.
          remat: compute the activations inside of layers again for the gradients, instead of keeping them: less memory,
            for a second forward pass. As a rule, these are the layers or blocks that the module calls.
          ema_decay: the decay, such as 0.999, of a moving average of the weights, with which `evaluate` and `predict`
            then compute. As in Keras, the first update sets it.
          freeze: a path pattern, or several, of parameters that are not trained, such as "encoder" or "dense.*/bias":
            regular expressions over whole segments of paths such as "encoder/Dense_0/kernel". As in Keras, BatchNorm
            with no other parameters normalizes by its running averages in training too, and does not move them.
          data_on_device: whether arrays, and `Dataset`s over them without `map`, are placed on the devices once, and
            batches gathered there. "auto" does so with data that `fit` reads more than once, if they fit into an eighth
            of a device's memory: each device holds all of them, or else its share of them if that fits. Each dataset
            counts on its own. They are placed once for all fits, until somebody writes to them; those of the last
            `fit` stay there as long as they exist. True does so with what `fit` trains on, whatever its size.
          compile_guard: what happens when a run compiles a step again for batches of ever other shapes: "warn",
            "error" or "off".
          skip_non_finite: leave out updates whose gradients, of the whole batch, are not all finite: parameters, the
            optimizer's state and the model state stay as they were. The log "skipped_steps" counts them, and
            "skipped_in_a_row" has the most in a row. float16's loss scale does this in any case.

        Raises:
          ValueError: for unknown names and values that cannot be used.
          TypeError: for arguments of a wrong type.
        """
        self._check_strategy()
        self._check_is_idle("Call `compile`")
        options = CompileOptions.checked(
            steps_per_execution=steps_per_execution, run_eagerly=run_eagerly, jit_compile=jit_compile,
            microbatches=microbatches, precision_name=precision, batch_norm=batch_norm, remat=remat,
            ema_decay=ema_decay, freeze=freeze, data_on_device=data_on_device, guard_mode=compile_guard,
            skip_non_finite=skip_non_finite)
        if options.microbatches > 1 and type(self).train_step is not CompiledModel.train_step:
            raise ValueError("`microbatches` divides the batches of the default `train_step`, but this model overrides "
                             "it. Override `compute_loss` instead, or divide the batch in the overridden step.")
        # All that may be refused comes before the first assignment: a failed call leaves the model as it was.
        compiled_loss = CompiledLoss(loss, loss_weights)
        compiled_metrics = CompiledMetrics(metrics, weighted_metrics, compiled_loss)
        rules = make_update_rules(optimizer, options)
        if self._functional.names:
            check_names(rules, self._functional.names, "named module")
        if self.built:
            self._check_against_params(rules, options, self.state_or_shapes.params)
        self._rules, self._loss, self._metrics, self._options = rules, compiled_loss, compiled_metrics, options
        self._is_compiled = True
        self._reset_phases()
        if self._state is not None:
            self._start_training_anew(self._state)

    @property
    def optimizer(self) -> Any:
        """The optimizer with its learning rate, which can be read and set; a dict of them for named modules."""
        if isinstance(self._rules, NamedRules):
            return {name: self._attached(rule.optimizer, name) for name, rule in self._rules.items()}
        return None if self._rules is None else self._attached(self._rules.optimizer, None)

    def _attached(self, optimizer: Optimizer, name: str | None) -> AttachedOptimizer:
        def read() -> Any:
            opt_state = None if self._state is None else self._state.opt_state
            return opt_state if name is None or opt_state is None else opt_state[name]

        def write(opt_state: Any) -> None:
            state = self._require_built()
            self._state = state.replace(
                opt_state=opt_state if name is None else {**state.opt_state, name: opt_state})

        return AttachedOptimizer(optimizer, read, write)

    @property
    def metrics(self) -> list[Any]:
        """The metrics of `compile`, once a first batch has shown which they are."""
        return self._metrics.metrics

    @property
    def metric_directions(self) -> dict[str, str]:
        """For each log whose better direction is known, "max" or "min"."""
        return {"loss": "min", **self._metrics.directions}

    @property
    def run_eagerly(self) -> bool:
        """Whether steps run uncompiled."""
        return self._options.eager

    @property
    def trainable(self) -> bool:
        """Whether the default `train_step` trains, and BatchNorm moves its averages. Setting it compiles anew."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._check_is_idle("Set `trainable`")
        self._trainable = bool(value)
        self._reset_phases()

    @property
    def skip_non_finite(self) -> bool:
        """Whether updates with gradients that are not finite are left out. Setting it compiles the train step anew.

        The optimizer's state stays. The next `compile` sets it again.
        """
        return self._options.skip_non_finite

    @skip_non_finite.setter
    def skip_non_finite(self, value: bool) -> None:
        if value == self.skip_non_finite:
            return
        self._check_is_idle("Set `skip_non_finite`")
        self._options = dataclasses.replace(self._options, skip_non_finite=bool(value))
        self._go_on_with(with_options(self._rules, self._options))
        self._reset_phases()

    # --- what a step computes; override to customise ---------------------------------------------------------------

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> jax.Array:
        """Returns this replica's share of the batch's loss, a scalar whose mean over replicas is the loss.

        Override it to add terms, or to compute a loss of one's own. It is called inside the step, on one replica's
        rows. Some of them may be repeats that pad the last batch, which the losses of `compile` leave out:

            return super().compute_loss(x, x, y_pred, sample_weight)  # an autoencoder, with compile(loss="mse")

        A mean of one's own is over the real rows of all replicas. Their numbers differ, so it is no mean of means:

            context = trainer.distribute.get_replica_context()
            per_row = jnp.square(x - y_pred).mean(-1) * context.row_mask
            return per_row.sum() * context.num_replicas_in_sync / context.global_rows
        """
        return self._loss.total(self._loss.values(y, y_pred, sample_weight))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
        """Returns the logs of the compiled metrics for this replica's rows, and the loss of each of several outputs."""
        logs: dict[str, Any] = {}
        if self._loss.is_given and len(jax.tree.leaves(y_pred)) > 1:
            losses = self._loss.values(y, y_pred, sample_weight)
            if len(losses) > 1:
                logs = {f"{name}_loss": value for name, value in losses.items()}
        return {**logs, **self._metrics.values(y, y_pred, sample_weight)}

    def train_step(self, state: TrainState, batch: Any) -> tuple[dict[str, Any], TrainState]:
        """Returns the logs and the state after one step on this replica's rows of a batch.

        Override it to change what a step does. It must be pure: it is compiled, and runs in each replica.

        Args:
          state: the state before the step.
          batch: what the data yielded; `trainer.unpack_x_y_sample_weight` splits it.

        Returns:
          `(logs, state)`. A log is a scalar, which is averaged over replicas and, weighted by rows, over steps; or what
          `compute_metrics` returns.
        """
        def compute(batch: Any) -> tuple[Any, Any, dict[str, Any]]:
            x, y, sample_weight = unpack_x_y_sample_weight(batch)

            def loss_and_outputs(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
                y_pred, model_state = self.apply(params, state, x, training=True)
                loss = output_checks.loss_of_real_rows(self.compute_loss, x, y, y_pred, sample_weight)
                return loss, (y_pred, model_state)

            gradient = jax.value_and_grad(loss_and_outputs, has_aux=True)
            (loss, (y_pred, model_state)), grads = gradient(state.params)
            logs = {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}
            return state.trainable(grads), model_state, logs

        microbatches = self._options.microbatches
        grads, model_state, logs = (
            compute(batch) if microbatches == 1 else accumulated(compute, batch, microbatches))
        return logs, state.apply_gradients(grads, model_state=model_state) if self.trainable else state

    def test_step(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Returns the logs for this replica's rows of a batch, without training. Like `train_step`, it must be pure."""
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        y_pred, _ = self.apply(state.params, state, x, training=False)
        loss = output_checks.loss_of_real_rows(self.compute_loss, x, y, y_pred, sample_weight)
        return {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}

    def predict_step(self, state: TrainState, batch: Any) -> Any:
        """Returns the outputs for this replica's rows of a batch. Like `train_step`, it must be pure."""
        x, _, _ = unpack_x_y_sample_weight(batch)
        return self.apply(state.params, state, x, training=False)[0]

    def apply(
        self, params: Any, state: TrainState, x: Any, *, module: str | None = None, training: bool = False
    ) -> tuple[Any, Any]:
        """Returns the module's outputs and the new model state; pure.

        Args:
          params: the parameters, those of the one module if `module` is given.
          state: what the model state, the seed and the step are taken from.
          x: the inputs.
          module: which module of a dict of modules.
          training: whether dropout drops, and BatchNorm takes the batch's statistics, unless it is frozen.
        """
        names: dict[str, Any] = {} if module is None else {"module": module}
        options = self._options
        apply: Callable[..., Any] = functools.partial(
            self._functional.apply, training=training, batch_norm=options.batch_norm, remat=options.remat,
            compute_dtype=None if options.policy is None else options.policy.compute_dtype,
            is_frozen=options.is_frozen if self.trainable else lambda path: True,
            make_key=lambda stream: self.make_rng(state, stream), **names)
        context = get_replica_context()
        # A replica's share of the loss is the larger the more replicas there are: its gradients must not overflow
        # sooner for that.
        scale = None if state.loss_scale is None else state.loss_scale / context.num_replicas_in_sync
        with replica_context.enter(context.for_module()):
            if options.policy is None:
                return apply(params, state.model_state, x)
            return apply_with_policy(options.policy, apply, params, state.model_state, x, scale)

    def make_rng(self, state: TrainState, stream: str) -> jax.Array:
        """Returns the key of a random stream for this step and this replica."""
        return stream_key(state.seed, stream, state.step, get_replica_context().replica_id_in_sync_group)

    # --- what the loop asks for (see `loop.Trainee`) ---------------------------------------------------------------

    def prepared_phase(self, kind: str, batch: Any) -> CompiledPhase:
        """Returns the compiled step of a phase, checked and traced on a first batch before anything compiles.

        Builds the model, if it is not. Raises ValueError for data that the model, the loss or the metrics cannot take.
        """
        self._check_strategy()
        if is_jit_disabled() and not self.run_eagerly:
            raise ValueError("JAX's `disable_jit` is on, but steps are to be compiled. Use `compile(run_eagerly=True)` "
                             "to see what a step computes, with `disable_jit` or without.")
        is_new, is_trained = kind not in self._phases, "train" in self._phases
        if is_new:
            output_checks.check_inputs_of_rank_one(self._functional, self.sample_inputs, batch, first_rows(batch),
                                            self._sample_spec if self.built else None)
        if self._options.eager and not self.built:
            self._build(batch)  # an eager step needs weights, and not only their shapes
        if self.built:
            phase = self._traced_phase(kind, self.state_or_shapes, batch)
        else:
            with self._building(batch) as shapes:
                phase = self._traced_phase(kind, shapes, batch)
        if is_new and not is_trained:  # later, processors of several kinds may have rounded differently
            self._check_alike(kind, lambda: describe_step(self.current_state, phase.program()))
        if kind != "predict":
            self.check_labels(batch)
            self._check_outputs(batch)
        return phase

    def _traced_phase(self, kind: str, state: Any, batch: Any) -> CompiledPhase:
        if kind not in self._phases:
            options = {name: getattr(self._options, name) for name in ("steps_per_execution", "eager", "remat")}
            options["strategy"] = type(self.strategy).__name__
            self._check_alike(kind, lambda: describe_model(state, batch, {**self.run_settings(), **options}))
            user_step = {"train": self.train_step, "test": self.test_step, "predict": self.predict_step}[kind]
            self._phases[kind] = CompiledPhase(
                kind, user_step, self.strategy,
                self._options.steps_per_execution, self._options.eager, self._options.compile_guard)
        try:
            self._phases[kind].prepare(state, batch)
        except Exception as error:
            output_checks.explain_other_inputs(self.sample_inputs(batch), self._sample_spec, error)
            raise
        return self._phases[kind]

    def _check_alike(self, kind: str, describe: Callable[[], Mapping[str, str]]) -> None:
        if self.strategy.spans_processes:
            with self.timing.measure("device"):  # or for other processes, which is the same to a watchdog
                check_alike(f"model for `{_METHODS[kind]}`", describe)

    def place_arrays(self, reader: Reader, passes: int, requested: bool = False) -> Any | None:
        """Returns the arrays that batches are gathered from on the devices; None if batches are sent there.

        Args:
          reader: what yields the batches.
          passes: how often the data will be read.
          requested: whether `data_on_device=True` is meant for these data: they are those to train on.

        Raises:
          ValueError: if such data are not arrays.
        """
        wanted, arrays = self._options.data_on_device, reader.arrays
        if self._options.eager or wanted is False:
            return None
        forced = requested and wanted is True
        if arrays is None or arrays.rows > np.iinfo(np.int32).max:
            if forced:
                raise ValueError("`data_on_device=True` needs data that batches are rows of: arrays, or a "
                                 "`trainer.data.Dataset` without `map`, of fewer than 2**31 rows. Compile with "
                                 "data_on_device='auto' for other data.")
            return None
        if not forced and passes < 2:
            return self.strategy.placed_arrays(arrays)
        return self.strategy.place_arrays(arrays, forced)

    def run_settings(self) -> dict[str, Any]:
        """Returns, as plain data, what must not differ when a run is resumed, and is not in the state's arrays."""
        options = self._options
        names = ("microbatches", "batch_norm", "ema_decay", "freeze", "skip_non_finite")
        return {"seed": self._seed, "precision": None if options.policy is None else repr(options.policy),
                **{name: getattr(options, name) for name in names}}

    def check_labels(self, batch: Any) -> None:
        """Raises ValueError for integer labels outside of the model's classes."""
        output_checks.check_labels(self._loss, unpack_x_y_sample_weight(batch)[1])

    def validate(self) -> dict[str, Any]:
        """Returns the logs, without "val_", over the `validation_data` of the `fit` that is running.

        Raises:
          ValueError: if no `fit` is running, or it has no validation data.
        """
        if self.validator is None:
            raise ValueError("There is nothing to validate on: call `validate` from a callback of a `fit` that has "
                             "`validation_data`, or `evaluate` with data.")
        return self.validator()

    def train_step_flops(self) -> float | None:
        """Returns how many floating-point operations a train step has over all devices, as XLA counts them.

        None before the step is traced, for an eager one, and where XLA does not know.
        """
        phase = self._phases.get("train")
        flops = None if phase is None else phase.step_flops
        return None if flops is None else flops * self.strategy.num_replicas_in_sync

    def train_step_text(self) -> str | None:
        """Returns the program that the train step was compiled to, as XLA's text; None if it did not compile yet."""
        phase = self._phases.get("train")
        return None if phase is None else phase.text()

    def _check_outputs(self, batch: Any) -> None:
        x, y, sample_weight = unpack_x_y_sample_weight(first_rows(batch))
        is_split = (self.strategy.num_replicas_in_sync > 1 or self._options.microbatches > 1
                    or sample_weight is not None)
        # Of named modules, only the user's own step knows which one gives the outputs.
        if is_split in self._outputs_checked or self._functional.names:
            return

        def apply(state: TrainState) -> Any:
            state = self.strategy.on_devices(state)
            return self.apply(state.params, state, x)[0]

        output_checks.check_outputs(self._loss, self._metrics, y, is_split,
                             lambda: run_once(apply, self._state, eager=self.run_eagerly))
        self._outputs_checked.add(is_split)

    def build_on(self, inputs: Any) -> None:
        before = self._sample_spec
        super().build_on(inputs)
        if self._sample_spec != before:
            self._reset_phases()  # they are of weights of other shapes

    def _check_is_idle(self, fix: str) -> None:
        if self.timing.is_running:
            raise RuntimeError("The model is running, with a step that was compiled as `compile` said before. "
                               f"{fix} when `fit` has ended; `model.stop_training = True` ends it.")

    def _reset_phases(self) -> None:
        self._phases: dict[str, CompiledPhase] = {}
        self._outputs_checked: set[bool] = set()  # with rows that count apart, and without
