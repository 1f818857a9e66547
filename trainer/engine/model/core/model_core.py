"""The core that `Model` holds. It prepares a phase for the loop.

Owns the checks before a phase compiles, and which of the model's overridable steps a phase runs.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import replica_context, trace_purity
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.compile.jit import is_jit_disabled, run_once
from trainer.core.compile.program_digest import program_digest
from trainer.core.compile.traces.first_uses import first_uses
from trainer.core.errors import see
from trainer.core.modules import FunctionalModule
from trainer.core.precision import with_matmul_precision
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState, initial_opt_state, shapes_of
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.reader import Reader
from trainer.data.sources.batches import Batch
from trainer.distribute import Strategy, get_strategy, has_strategy
from trainer.engine.model.core import own_steps
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.current_run import CurrentRun
from trainer.engine.model.core.run_fingerprint import describe_model, describe_step
from trainer.engine.model.core.state_holder import StateHolder, first_rows
from trainer.engine.step import output_checks, steps, update_rules
from trainer.engine.step.compiled_loss import MissingTargetsError
from trainer.engine.step.compiled_phase import CompiledPhase
from trainer.engine.step.input_casts import check_inputs_fit, overflows
from trainer.engine.step.lowering import StepParts, why_not_replicated
from trainer.metrics.variable import asks_for_value
from trainer.optimizers.named import optimizer_kinds

if TYPE_CHECKING:
    from trainer.distribute.parameter_server.strategy import ParameterServerStrategy

_METHODS = {"train": "fit", "test": "evaluate", "predict": "predict"}  # the methods that run a phase, for messages
_FLAGS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class UserModel(Protocol):
    """The methods of a model that users may override; see `engine/model/overridable_steps.py`."""

    name: str
    _core: ModelCore

    def sample_inputs(self, batch: Batch) -> Any: ...
    def train_step(self, state: TrainState, batch: Batch) -> tuple[dict[str, Any], TrainState]: ...
    def test_step(self, state: TrainState, batch: Batch) -> dict[str, Any]: ...
    def predict_step(self, state: TrainState, batch: Batch) -> Any: ...
    def compute_loss(self, x: PyTree = None, y: PyTree = None, y_pred: PyTree = None, sample_weight: PyTree = None,
                     training: bool = True) -> jax.Array: ...
    def apply(self, params: PyTree, state: TrainState, x: PyTree, *, module: str | None = None,
              training: bool | None = None) -> tuple[Any, Any]: ...
    def make_rng(self, state: TrainState, stream: str) -> jax.Array: ...

    def __train_step_as_resource__(self) -> Any:
        """Returns an object whose `__as_resource__` gives `train_step` to workers, without a state."""


M = TypeVar("M", bound=UserModel)


def core_of(model: UserModel) -> ModelCore:
    """Returns the core of a model."""
    return model._core


def copied(model: M, strategy: Strategy, configuration: Configuration) -> M:
    """Returns a copy of the model under a strategy, with its own configuration and without weights."""
    made, core = object.__new__(type(model)), core_of(model)
    vars(made).update(vars(model))
    made._core = ModelCore(made, core.defaults, core.module, strategy, core.state.seed, configuration)
    return made


class ModelCore:
    """The module, strategy, state, configuration and run of a model.

    Args:
      model: the model whose steps run.
      defaults: the class with the default steps.
      seed: seed of the weights and of all other random streams.
      configuration: the arguments of `compile`; by default the configuration of an uncompiled model.

    Attributes:
      state: holds the training state.
      current_run: the current run, or the last run.
    """

    def __init__(self, model: UserModel, defaults: type, module: FunctionalModule, strategy: Strategy, seed: int,
                 configuration: Configuration | None = None):
        self._model, self.defaults = model, defaults
        self.module = module
        self.strategy = strategy
        self.configuration = configuration or Configuration()
        self.state = StateHolder(model, module, strategy, seed, self.configuration, self._clock)
        self.current_run = CurrentRun(self.state, self.configuration, strategy)
        self._row_shapes: dict[str, Any] = {}  # of the first batch of each phase

    def _clock(self) -> Timing:
        return self.current_run.timing

    def exchange_module(self, module: FunctionalModule) -> None:
        """Replaces the module of a model without weights; raises RuntimeError if there are weights."""
        self.state.exchange_module(module)
        self.module = module

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_scope(self) -> None:
        """Raises ValueError in the scope of a strategy other than the model's."""
        if has_strategy() and get_strategy() is not self.strategy:
            raise ValueError(f"The model was made under {self.strategy!r}, but {get_strategy()!r} is in scope. "
                             f"Make, compile and fit a model under one strategy. {see('other-strategy')}")

    def checked(self, method: str, must_be_compiled: bool = True) -> ModelCore:
        """Returns the core. Raises if the method needs `compile` first, or if a step is being traced."""
        if must_be_compiled:
            self.configuration.require_compiled(method)
        self.check_is_outside_of_steps()
        return self

    def check_is_outside_of_steps(self) -> None:
        """Raises TypeError while a step is traced, because the state of the model would become a constant in it."""
        trace_purity.check_may_read(
            self._model, self._model, "the state of a model that it calls", "In a step of the model, call "
            "`self.apply(params, state, x, training=...)[0]`; `compute_loss` is given these outputs as `y_pred`. Call "
            "another model, whose weights are constants there, by `teacher.apply(teacher.state.params, teacher.state, "
            "x)[0]`. Pass `model.state` as an argument of `run`, and use `model.apply` in its function.")

    def overrides(self, method: str) -> bool:
        """Returns whether the user overrides a method."""
        return method in vars(self._model) or (
            getattr(type(self._model), method) is not getattr(self.defaults, method))

    # --- for the loop ----------------------------------------------------------------------------------------------

    def stops(self, kind: str) -> bool:
        """Returns whether "train", "test" or "predict" must end, by `model.stop_training` or its relatives."""
        return bool(getattr(self._model, _FLAGS[kind]))

    def set_stops(self, kind: str, stops: bool) -> None:
        """Sets `stops` at the beginning of a phase, or after a request of another process."""
        setattr(self._model, _FLAGS[kind], stops)

    def assert_consistent(self, what: str, describe: Callable[[], Mapping[str, str]]) -> None:
        """Raises ClusterError in all processes unless all have the same description of a part of the run, `what`."""
        if self.strategy.spans_processes:
            with self.current_run.timing.device:  # or for other processes; a watchdog treats both the same
                self.strategy.process_group.assert_consistent(what, describe)

    def prepared_phase(self, kind: str, batch: Batch) -> CompiledPhase:
        """Returns the compiled step of a phase, checked and traced on a first batch before anything compiles.

        Builds the model if needed.

        Raises:
          ValueError: for data that the model, the loss or the metrics cannot take.
        """
        state, configuration, sample_inputs = self.state, self.configuration, self._model.sample_inputs
        eager, phases = configuration.options.eager, configuration.phases
        self.check_scope()
        if is_jit_disabled() and not eager:
            raise ValueError("JAX's `disable_jit` is on, but steps are to be compiled. Use `compile(run_eagerly=True)` "
                             "to see what a step computes, with `disable_jit` or without.")
        if kind in phases and phases[kind].constants.are_stale:
            warnings.warn(f"The {kind} step is compiled again: it reads the weights of another model, which have "
                          "changed, and are constants in it. If they change often, make both models one: "
                          "`Model({\"student\": ..., \"teacher\": ...})`, with a `train_step`.", stacklevel=2)
            del phases[kind]
            configuration.proofs.clear()
        is_new, is_trained = kind not in phases, "train" in phases
        if is_new and self._is_asynchronous(kind):
            configuration.options.check_asynchronous()
            update_rules.check_asynchronous(configuration.rules)
        rows = first_rows(batch)
        if is_new:
            output_checks.check_inputs_of_rank_one(
                self.module, sample_inputs, batch, rows, state.inputs if state.is_built else None)
        if eager and not state.is_built:
            state.build(sample_inputs(rows))  # an eager step needs weights, not just shapes
        shapes = (contextlib.nullcontext(state.state_or_shapes) if state.is_built
                  else state.building(sample_inputs(rows)))
        with shapes as state_or_shapes:
            phase = self._traced_phase(kind, state_or_shapes, batch)
        if is_new and not is_trained:  # after training, different kinds of processors may have rounded differently
            self.assert_consistent(
                f"model for `{_METHODS[kind]}`", lambda: describe_step(state.current, phase.lowered_text()))
        policy = self.configuration.options.policy
        if policy is not None and overflows(policy):
            self._row_shapes[kind] = shapes_of(rows)
        self.check_values(kind, batch)
        if kind != "predict":
            self._check_outputs(rows)
        return phase

    def arrays_to_gather_from(
        self, kind: str, reader: Reader, passes: int, data_on_device: bool = False
    ) -> Any | None:
        """Returns the on-device arrays that batches are gathered from; None if batches are sent to the devices.

        Args:
          kind: the phase.
          passes: number of passes over the data.
          data_on_device: whether `data_on_device=True` refers to these data, which are the training data.

        Raises:
          ValueError: if such data are not arrays.
        """
        options = self.configuration.options
        wanted, arrays = options.data_on_device, reader.arrays
        if self._is_asynchronous(kind) and arrays is not None:
            return cast("ParameterServerStrategy", self.strategy).shared_arrays(arrays, wanted)
        if options.eager or wanted is False:
            return None
        forced = data_on_device and wanted is True
        if arrays is None or arrays.rows > np.iinfo(np.int32).max:
            if forced:
                raise ValueError("`data_on_device=True` needs data that batches are rows of: arrays, or a "
                                 "`trainer.data.Dataset` without `map`, of fewer than 2**31 rows. Compile with "
                                 "data_on_device='auto' for other data.")
            return None
        if not forced and (passes < 2 or not self.strategy.keeps_arrays):
            return self.strategy.cached_arrays(arrays)
        return self.strategy.place_arrays(arrays, forced)

    def run_settings(self) -> dict[str, Any]:
        """Returns the settings outside of the state that a resumed run must share, as plain data."""
        configuration, options = self.configuration, self.configuration.options
        names = ("microbatches", "batch_norm", "ema_decay", "freeze", "skip_non_finite", "deterministic",
                 "matmul_precision")
        return {"seed": self.state.seed, "optimizer": optimizer_kinds(configuration.rules),
                "loss": configuration.loss.kinds,
                "precision": None if options.policy is None else repr(options.policy),
                "regularizers": [[pattern, getattr(penalty, "__name__", None) or repr(penalty)]
                                 for pattern, penalty in options.regularizers],
                **{name: getattr(options, name) for name in names}}

    def program_digests(self, batch: Batch) -> dict[str, str]:
        """Returns digests of the optimizer, the loss and `train_step`, to compare a resumed run.

        They distinguish functions or hyperparameters with the same name in `run_settings`. There is no digest of code
        that cannot be traced.
        """
        if self.configuration.options.eager:
            return {}  # eager steps may depend on values
        model, state = self._model, self.state.shapes()
        x, y, sample_weight = unpack_x_y_sample_weight(batch)

        def update(state: TrainState) -> Any:
            state = state.replace(opt_state=initial_opt_state(state.optimizer, state.params))
            grads, loss = state.differentiable, jnp.zeros(())
            return state.opt_state, state.apply_gradients(grads, value=loss, value_fn=lambda params: loss)

        def loss_and_gradient(outputs: Any) -> Any:
            return jax.value_and_grad(
                lambda outputs: model.compute_loss(x, y, outputs, sample_weight), allow_int=True)(outputs)

        def digest_of_loss() -> str:
            return program_digest(loss_and_gradient, jax.eval_shape(
                functools.partial(self._outputs, True), state, batch))

        computing: dict[str, Callable[[], str]] = {"the optimizer": lambda: program_digest(update, state)}
        if self.overrides("train_step"):
            computing["`train_step`, with the module,"] = lambda: program_digest(model.train_step, state, batch)
        else:
            computing["the loss"] = digest_of_loss
        digests = {}
        with replica_context.enter(replica_context.context_outside(batch)):
            for name, compute in computing.items():
                # There may be no optimizer, or only the step uses it.
                with contextlib.suppress(Exception):
                    digests[name] = compute()
        return digests

    def note_loss(self, value: Any) -> None:
        """Gives the metric of the loss its result over an epoch, which Keras's metric has after a run."""
        self.configuration.noted_loss = value

    def check_values(self, kind: str, batch: Batch) -> None:
        """Raises ValueError for labels that the loss cannot take, and inputs that the compute dtype cannot represent.

        Leaves may have a leading axis of batches.
        """
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        policy = self.configuration.options.policy
        if policy is not None and overflows(policy):
            check_inputs_fit(policy, x, lambda: self._uses_of_inputs(kind, policy.compute_dtype))
        if kind != "predict":
            output_checks.check_labels(self.configuration.loss, self.configuration.metrics, y, sample_weight)

    def _uses_of_inputs(self, kind: str, dtype: Any) -> Any:
        """Returns the `first_uses` of each leaf of `x` in the step of a phase."""
        run, step = {"train": (steps.train_one_batch, self._model.train_step),
                     "test": (steps.test_one_batch, self._model.test_step),
                     "predict": (steps.predict_one_batch, self._model.predict_step)}[kind]
        traced = functools.partial(run, step, replica_context.single_context)
        uses = first_uses(lambda values: traced(values["state"], values["batch"]),
                          {"state": self.state.shapes(), "batch": self._row_shapes[kind]}, dtype)
        return unpack_x_y_sample_weight(uses["batch"])[0]

    def _traced_phase(self, kind: str, state: TrainState, batch: Batch) -> CompiledPhase:
        phases, options, model = self.configuration.phases, self.configuration.options, self._model
        is_new = kind not in phases
        if is_new:
            settings = {name: getattr(options, name) for name in ("steps_per_execution", "eager", "remat")}
            settings["strategy"] = type(self.strategy).__name__
            settings["compiler options"] = self.strategy.compiler_options(options.deterministic)
            self.assert_consistent(f"model for `{_METHODS[kind]}`",
                                   lambda: describe_model(state, batch, {**self.run_settings(), **settings}))
            step = {"train": model.train_step, "test": model.test_step, "predict": model.predict_step}[kind]
            own_steps.check_signature(step, kind)
            if options.matmul_precision is not None:
                step = _with_matmul_precision(step, options.matmul_precision)
            phases[kind] = self._remote_phase() if self._is_asynchronous(kind) else CompiledPhase(
                kind, step, self.strategy, options.steps_per_execution, options.eager, options.compile_guard,
                options.deterministic, functools.partial(self.why_not_replicated, kind))
            self.configuration.penalties_are_used = False
            self.configuration.training_arguments.clear()
            if kind == "train" and options.freezes_all(named_leaves(state.params)):
                warnings.warn(f"`freeze={list(options.freeze)!r}` matches every parameter of the model, so that none "
                              "is trained. A pattern matches a path if it matches any segments of it, also those below "
                              "a layer that it excludes. To freeze all but a layer 'head', begin at the start of the "
                              "path: `freeze=['^(?!head/).*']`.", stacklevel=user_stacklevel())
        try:
            phases[kind].trace(state, batch)
        except MissingTargetsError as error:
            is_validation = kind == "test" and self.current_run.describe is not None  # or `evaluate` in a callback
            raise ValueError(f"{error} Pass {'`validation_data=(x, y)`, ' * is_validation}`{_METHODS[kind]}(x, y)`, or "
                             "batches `(x, y)`.") from None
        except Exception as error:
            if asks_for_value(error):
                own_steps.explain_value(error)
                raise
            own_steps.explain_gradient(error)
            output_checks.explain_other_inputs(model.sample_inputs(batch), self.state.inputs, error)
            raise
        if is_new and kind == "train":
            self._check_own_step(state, batch)
        return phases[kind]

    def _is_asynchronous(self, kind: str) -> bool:
        """Returns whether the steps of a phase run on workers."""
        return kind == "train" and self.strategy.is_asynchronous

    def _remote_phase(self) -> CompiledPhase:
        from trainer.engine.step.on_workers.remote_phase import (
            RemotePhase,  # for the few programs with parameter servers
        )

        strategy = cast("ParameterServerStrategy", self.strategy)
        return RemotePhase(
            self._model.train_step, self._model.__train_step_as_resource__(), strategy,
            self.configuration.options.steps_per_execution, strategy.served(self.state, self.module.embeddings),
            functools.partial(  # of values alone: float16 is refused
                output_checks.check_labels, self.configuration.loss, self.configuration.metrics))

    def _check_own_step(self, state: TrainState, batch: Batch) -> None:
        """Raises or warns if a traced train step of the user has a mistake that its trace shows."""
        configuration, model, has_own_step = self.configuration, self._model, self.overrides("train_step")
        if has_own_step:
            if not configuration.penalties_are_used:
                own_steps.check_penalties(bool(configuration.options.regularizers), self.module.sows_losses)
            if configuration.training_arguments == {None}:
                own_steps.warn_of_inference(model.apply, state, batch)
        if has_own_step or self.overrides("compute_loss"):
            own_steps.warn_of_crossed_rows(
                "train_step" if has_own_step else "compute_loss", model.train_step,
                functools.partial(self._outputs, True), state, batch)

    def why_not_replicated(self, kind: str, shapes: TrainState, batch: Batch) -> str | None:
        """Returns the reason, as a clause, why a step on a batch is partitioned; None if it is replicated."""
        options, is_train = self.configuration.options, kind == "train"
        parts = StepParts(
            kind, self._overridden(kind), functools.partial(self._outputs_and_state, is_train),
            self.module.sows_losses, self.configuration.loss, self.configuration.metrics,
            options.microbatches if is_train else 1)
        return why_not_replicated(
            parts, shapes, self.strategy.num_replicas_in_sync, batch, self.configuration.proofs)

    def _outputs(self, training: bool, state: TrainState, batch: Batch) -> Any:
        return self._outputs_and_state(training, state, batch)[0]

    def _outputs_and_state(self, training: bool, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Returns the module's outputs and its state, with BatchNorm in inference mode."""
        x = unpack_x_y_sample_weight(batch)[0]
        return self.module.apply(
            state.params, state.model_state, x, training=training, is_frozen=lambda path: True,
            make_key=lambda stream: self._model.make_rng(state, stream))

    def _overridden(self, kind: str) -> list[str]:
        """Returns the user's own methods that a phase calls."""
        of_loss = () if kind == "predict" else ("compute_loss", "compute_penalties", "compute_metrics")
        return [name for name in (f"{kind}_step", *of_loss, "apply", "make_rng") if self.overrides(name)]

    def _check_outputs(self, rows: Batch) -> None:
        configuration = self.configuration
        # Only the user's own step knows which of several named modules gives the outputs.
        if configuration.outputs_are_checked or self.module.names:
            return
        x, y, _ = unpack_x_y_sample_weight(rows)

        def apply(state: TrainState) -> Any:
            state = self.strategy.on_devices(state)
            return self._model.apply(state.params, state, x)[0]

        output_checks.check_outputs(
            configuration.loss, configuration.metrics, y,
            lambda: run_once(apply, self.state.current, eager=configuration.options.eager),
            None if configuration.options.eager else lambda: jax.make_jaxpr(apply)(self.state.state_or_shapes))
        configuration.outputs_are_checked = True


def _with_matmul_precision(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(step)
    def precise_step(*args: Any) -> Any:
        with with_matmul_precision(name):
            return step(*args)

    return precise_step
