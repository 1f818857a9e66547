"""CompiledModel: a module, its compile options and its training state; what the loop trains.

Owns what a step computes by default, when phases are traced, and who holds the state's buffers. How a step runs on a
mesh is in `step.py` and `phase.py`, when it runs in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from trainer import checks, errors, optimizers
from trainer.attached_optimizer import AttachedOptimizer
from trainer.compiled_loss import CompiledLoss
from trainer.compiled_metrics import CompiledMetrics
from trainer.compiled_step import copy_buffers, init_placed, run_once
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.batches import as_batch
from trainer.distribute import get_strategy, has_strategy
from trainer.modules import as_functional
from trainer.optimizers.named import NamedOptimizers
from trainer.phase import CompiledPhase
from trainer.replica import get_replica_context
from trainer.rng import stream_key
from trainer.state import TrainState, initial_opt_state, initial_state

INIT_ROWS = 8  # a model is initialised, and its outputs are checked, on so many rows of the first batch


class CompiledModel:
    """A Flax module with a loss, metrics, an optimizer and a state. See `Model`, which adds `fit` and the rest."""

    def __init__(self, module: Any, *, seed: int = 0, name: str | None = None):
        self._functional = as_functional(module)
        checks.check_count("seed", seed, 0)
        self.name = name or self._functional.name
        self.strategy = get_strategy()
        self.stop_training = self.stop_evaluating = self.stop_predicting = False
        self._seed = seed
        self._trainable = True
        self._is_compiled = False
        self._batch_norm = "global"
        self._execution: dict[str, Any] = {"steps_per_execution": "auto", "eager": False}
        self._optimizer: Any = None
        self._loss, self._metrics = CompiledLoss(None), CompiledMetrics()
        self._state: TrainState | None = None
        self._state_is_lent = False
        self._sample_spec: Any = None
        self._outputs_are_checked = False
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
    ) -> None:
        """Says how to train. Weights that exist already are kept; the optimizer starts anew.

        Args:
          optimizer: a Keras name, an optimizer of `trainer.optimizers`, any optax transformation, or, for a dict of
            modules, a dict of these by module name.
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

        Raises:
          ValueError: for unknown names and values that cannot be used.
          TypeError: for arguments of a wrong type.
        """
        self._check_strategy()
        if batch_norm not in ("global", "per_replica"):
            raise errors.unknown_name("batch_norm", str(batch_norm), ("global", "per_replica"))
        if steps_per_execution != "auto":
            checks.check_count("steps_per_execution", steps_per_execution, 1)
        if jit_compile not in (True, False, "auto"):
            raise ValueError(f"`jit_compile` must be True, False or 'auto'. Received: {jit_compile!r}.")
        # All that may be refused comes before the first assignment: a failed call leaves the model as it was.
        compiled_loss = CompiledLoss(loss, loss_weights)
        compiled_metrics = CompiledMetrics(metrics, weighted_metrics, compiled_loss)
        self._optimizer = self._resolve_optimizer(optimizer)
        self._loss, self._metrics = compiled_loss, compiled_metrics
        self._batch_norm = batch_norm
        self._execution = {"steps_per_execution": steps_per_execution, "eager": run_eagerly or jit_compile is False}
        self._is_compiled = True
        self._reset_phases()
        if self._state is not None:
            opt_state = init_placed(lambda params: initial_opt_state(self._optimizer, params),
                                    self.strategy.state_sharding, self._state.params)
            self._state = self._state.replace(optimizer=self._optimizer, opt_state=opt_state)

    def _resolve_optimizer(self, optimizer: Any) -> Any:
        if not isinstance(optimizer, Mapping):
            return None if optimizer is None else optimizers.get(optimizer)
        names = list(self._functional.names)
        if sorted(optimizer) != sorted(names):
            raise ValueError("`optimizer` is a dict, so it must have one optimizer per named module. "
                             f"Received: {sorted(map(str, optimizer))}; the model's modules are "
                             f"{names or 'not named'}.")
        return NamedOptimizers({name: optimizers.get(part) for name, part in optimizer.items()})

    @property
    def optimizer(self) -> Any:
        """The optimizer with its learning rate, which can be read and set; a dict of them for named modules."""
        if self._optimizer is None:
            return None
        if isinstance(self._optimizer, NamedOptimizers):
            return {name: self._attached(part, name) for name, part in self._optimizer.items()}
        return self._attached(self._optimizer, None)

    def _attached(self, optimizer: optimizers.Optimizer, name: str | None) -> AttachedOptimizer:
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
        return self._execution["eager"]

    @property
    def trainable(self) -> bool:
        """Whether the default `train_step` updates parameters. Setting it compiles the train step anew."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        self._reset_phases()

    # --- what a step computes; override to customise ---------------------------------------------------------------

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> jax.Array:
        """Returns this replica's share of the batch's loss, a scalar whose mean over replicas is the loss.

        Override it to add terms, or to compute a loss of one's own. It is called inside the step, on one replica's
        rows.
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
        x, y, sample_weight = unpack_x_y_sample_weight(batch)

        def loss_and_outputs(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            y_pred, model_state = self.apply(params, state, x, training=True)
            return self.compute_loss(x, y, y_pred, sample_weight), (y_pred, model_state)

        if self.trainable:
            compute = jax.value_and_grad(loss_and_outputs, has_aux=True)
            (loss, (y_pred, model_state)), grads = compute(state.params)
            state = state.apply_gradients(grads, model_state=model_state)
        else:
            loss, (y_pred, _) = loss_and_outputs(state.params)
        return {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}, state

    def test_step(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Returns the logs for this replica's rows of a batch, without training. Like `train_step`, it must be pure."""
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        y_pred, _ = self.apply(state.params, state, x, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
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
          training: whether dropout drops, and BatchNorm takes the batch's statistics.
        """
        options: dict[str, Any] = {} if module is None else {"module": module}
        return self._functional.apply(
            params, state.model_state, x, training=training, batch_norm=self._batch_norm,
            make_key=lambda stream: self.make_rng(state, stream), **options)

    def make_rng(self, state: TrainState, stream: str) -> jax.Array:
        """Returns the key of a random stream for this step and this replica."""
        return stream_key(state.seed, stream, state.step, get_replica_context().replica_id_in_sync_group)

    def sample_inputs(self, batch: Any) -> Any:
        """Returns what the module is initialised on, from some rows of the first batch.

        Override it for a dict of modules: it then returns a dict of inputs by module name.
        """
        return unpack_x_y_sample_weight(batch)[0]

    # --- the state -------------------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the model has weights."""
        return self._state is not None

    @property
    def state(self) -> TrainState:
        """The training state. Arrays read here stay valid: the next train step works on a copy.

        Raises:
          RuntimeError: if the model is not built.
        """
        state = self._require_built()
        self._state_is_lent = True
        return state

    @state.setter
    def state(self, value: TrainState) -> None:
        if not isinstance(value, TrainState):
            raise errors.wrong_type("state", value, "a TrainState, as `model.state` or a custom step returns it")
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(self._require_built())
        if structure != jax.tree.structure(value):
            raise ValueError("`state` has another structure than the model's state. Change the present one with "
                             "`model.state.replace(...)`.")
        placed = self.strategy.place_state(value)
        for (path, leaf), present in zip(
                jax.tree.leaves_with_path(placed), jax.tree.leaves(self._state), strict=True):
            if (leaf.shape, leaf.dtype) != (present.shape, present.dtype):
                raise ValueError(f"`state{jax.tree_util.keystr(path)}` must be an {errors.describe(present)}. "
                                 f"Received: an {errors.describe(leaf)}.")
        self._state, self._state_is_lent = placed, True

    def build(self, sample: Any) -> None:
        """Makes the weights from the shapes of a sample.

        Args:
          sample: some rows of inputs `x`: an array, a list of numbers, or a tuple or dict of these.

        Raises:
          ValueError: if `sample` holds no rows (a shape, for example), or the module cannot take such inputs.
        """
        self._build(as_batch(pack_x_y_sample_weight(sample)))

    def _build(self, batch: Any) -> None:
        inputs = self.sample_inputs(jax.tree.map(lambda leaf: leaf[:INIT_ROWS], batch))

        def make_state(seed: jax.Array, inputs: Any, initial_values: Any) -> TrainState:
            try:
                params, model_state, _ = self._functional.init(stream_key(seed, "params"), inputs, initial_values)
            except Exception as error:
                raise ValueError(f"The module cannot take such `x`: {errors.describe(inputs)}. It raised "
                                 f"{type(error).__name__}: {error}") from error
            return initial_state(params, model_state, self._optimizer, seed)

        seed = np.uint32(self._seed)
        self._state = init_placed(
            make_state, self.strategy.state_sharding, seed, inputs, self._functional.initial_values)
        self._state_is_lent = False
        self._sample_spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), inputs)

    def _require_built(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("The model has no weights yet. Call `build(sample)` with some rows of inputs, or `fit`.")
        return self._state

    def _check_strategy(self) -> None:
        if has_strategy() and get_strategy() is not self.strategy:
            raise ValueError(f"The model was made under {self.strategy!r}, but {get_strategy()!r} is in scope. "
                             "Make, compile and fit a model under one strategy.")

    # --- what the loop asks for (see `loop.Trainee`) ---------------------------------------------------------------

    @property
    def current_state(self) -> TrainState:
        """The state, for reading only: the next train step may reuse its buffers."""
        return self._require_built()

    def take_state(self) -> TrainState:
        """Returns the state in buffers that nobody else holds, so that a step may donate them."""
        state = self._require_built()
        if self._state_is_lent:
            state = self._state = copy_buffers(state)
            self._state_is_lent = False
        return state

    def keep_state(self, state: TrainState) -> None:
        """Makes `state`, which a step returned, the model's state."""
        self._state = state

    def prepared_phase(self, kind: str, batch: Any) -> CompiledPhase:
        """Returns the compiled step of a phase, checked and traced on a first batch before anything compiles.

        Builds the model, if it is not. Raises ValueError for data that the model, the loss or the metrics cannot take.
        """
        self._check_strategy()
        if self._state is None:
            self._build(batch)
        if kind not in self._phases:
            user_step = {"train": self.train_step, "test": self.test_step, "predict": self.predict_step}[kind]
            self._phases[kind] = CompiledPhase(kind, user_step, self.strategy, **self._execution)
        try:
            self._phases[kind].prepare(self._state, batch)
        except Exception as error:
            self._explain_other_inputs(batch, error)
            raise
        if kind != "predict":
            self.check_labels(batch)
            self._check_outputs(batch)
        return self._phases[kind]

    def check_labels(self, batch: Any) -> None:
        """Raises ValueError for integer labels outside of the model's classes."""
        checks.check_labels(self._loss, unpack_x_y_sample_weight(batch)[1])

    def _check_outputs(self, batch: Any) -> None:
        # Of named modules, only the user's own step knows which one gives the outputs.
        if self._outputs_are_checked or self._functional.names:
            return
        splits_functions = self._loss.has_functions and self.strategy.num_replicas_in_sync > 1
        if self._loss.expects_probabilities or self._metrics.has_custom or splits_functions:
            x, y, _ = unpack_x_y_sample_weight(jax.tree.map(lambda leaf: leaf[:INIT_ROWS], batch))
            outputs = run_once(lambda state: self.apply(state.params, state, x)[0], self._state, eager=self.run_eagerly)
            checks.check_probabilities(self._loss, outputs)
            if splits_functions:
                checks.check_means_over_rows(self._loss, y, outputs)
            self._metrics.check_additive(y, outputs)
        self._outputs_are_checked = True

    def _explain_other_inputs(self, batch: Any, error: Exception) -> None:
        received = [leaf.shape[1:] for leaf in jax.tree.leaves(self.sample_inputs(batch))]
        built = [leaf.shape[1:] for leaf in jax.tree.leaves(self._sample_spec)]
        if received != built:
            raise ValueError(f"`x` has rows of shape {', '.join(map(str, received))}, but the model was built on rows "
                             f"of shape {', '.join(map(str, built))}, and cannot take others: {error}") from error

    def _reset_phases(self) -> None:
        self._phases: dict[str, CompiledPhase] = {}
        self._outputs_are_checked = False
