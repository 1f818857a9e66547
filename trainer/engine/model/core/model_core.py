"""The core that `Model` holds, and its current run. The core prepares a phase for the loop.

Owns the checks before a phase compiles, which of the model's overridable steps a phase runs, and how a nested run, such
as an `evaluate` in a callback, counts for the outer run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import jax
import numpy as np

from trainer.core import replica_context, trace_purity
from trainer.core.ambient.jax_options import jax_config
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.compile.jit import run_once
from trainer.core.compile.traces.first_uses import first_uses
from trainer.core.errors import see
from trainer.core.modules import FunctionalModule
from trainer.core.precision import with_matmul_precision
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState, shapes_of
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.reader import Reader
from trainer.data.sources.arrays import Batch
from trainer.distribute import Strategy, get_strategy, has_strategy
from trainer.engine.model.core import own_steps, run_fingerprint, saved_model
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.state_holder import StateHolder, first_rows
from trainer.engine.saving.arrays.file_kinds import checked_path
from trainer.engine.saving.checkpoint import CheckpointWriter
from trainer.engine.step import output_checks, steps, update_rules
from trainer.engine.step.compiled_loss import MissingTargetsError
from trainer.engine.step.compiled_phase import CompiledPhase
from trainer.engine.step.input_casts import check_inputs_fit, overflows
from trainer.engine.step.lowering import StepParts, why_not_replicated
from trainer.metrics.variable import asks_for_value

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
        if must_be_compiled and not self.configuration.is_compiled:
            raise RuntimeError(f"Call `compile(optimizer, loss)` before `{method}`. {see('not-compiled')}")
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
        if jax_config.jax_disable_jit and not eager:
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
                f"model for `{_METHODS[kind]}`",
                lambda: run_fingerprint.describe_step(state.current, phase.lowered_text()))
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
        return run_fingerprint.run_settings(self.configuration, self.state.seed)

    def program_digests(self, batch: Batch) -> dict[str, str]:
        """Returns digests of the optimizer, the loss and `train_step`; see `run_fingerprint.program_digests`."""
        if self.configuration.options.eager:
            return {}  # eager steps may depend on values
        model = self._model
        return run_fingerprint.program_digests(
            self.state.shapes(), batch, functools.partial(self._outputs, True), model.compute_loss,
            model.train_step if self.overrides("train_step") else None)

    def note_loss(self, value: Any) -> None:
        """Gives the metric of the loss its result over an epoch, which Keras's metric has after a run."""
        self.configuration.noted_loss = value

    def check_values(self, kind: str, batch: Batch) -> None:
        """Raises ValueError for labels that the loss cannot take, and inputs that the compute dtype cannot represent.

        Leaves may have a leading axis of batches.
        """
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        loss, metrics, policy = self.configuration.loss, self.configuration.metrics, self.configuration.options.policy
        if policy is not None and overflows(policy):
            check_inputs_fit(policy, x, lambda: self._uses_of_inputs(kind, policy.compute_dtype))
        if kind != "predict" and (loss.label_limits or metrics.label_limits):
            output_checks.check_labels(loss, metrics, y, sample_weight)

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
            self.assert_consistent(
                f"model for `{_METHODS[kind]}`",
                lambda: run_fingerprint.describe_model(state, batch, {**self.run_settings(), **settings}))
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


class CurrentRun:
    """The current run of `fit`, `evaluate` or `predict`, or the last run.

    It is `model.current_run` for callbacks; `trainer.callbacks.RunDetails` documents these members.

    Attributes:
      timing: the clock of the run.
      sets: the names of the evaluated data sets; "" for a set without a name.
      validator: evaluates these sets while a `fit` with validation data runs; otherwise None.
      describe: returns the arguments and the data of a running `fit` as plain data; otherwise None.
    """

    def __init__(self, state: StateHolder, configuration: Configuration, strategy: Strategy):
        self._state = state
        self._configuration = configuration
        self._strategy = strategy
        self._writer: CheckpointWriter | None = None
        self.timing = Timing()
        self.timing.end()
        self.validator: Callable[[], dict[str, Any]] | None = None
        self.sets: Sequence[str] = ()
        self.describe: Callable[[], dict[str, Any]] | None = None

    # --- for the loop ----------------------------------------------------------------------------------------------

    def check_is_idle(self, fix: str) -> None:
        """Raises RuntimeError during a run; `fix` names the call to make later."""
        if self.timing.is_running:
            raise RuntimeError("The model is running, with a step that was compiled as `compile` said before. "
                               f"{fix} when `fit` has ended; `model.stop_training = True` ends it.")

    @contextlib.contextmanager
    def timed(self, timing: Timing | None = None, call: str = "", trains: bool = False) -> Iterator[Timing]:
        """Gives a run its own clock inside the block, and then restores the clock of the outer run.

        Args:
          timing: the clock; a new clock by default.
          call: the name of the method, if it uses the weights.
          trains: whether it changes them.

        Raises:
          RuntimeError: if another thread trains the model, or uses the weights that this run changes.
        """
        calls, mine = self._state.calls, (threading.current_thread(), call, trains)
        calls.append(mine)  # before the others are looked at: of two threads that begin together, one sees the other
        for thread, other, other_trains in list(calls):
            if call and other and thread is not mine[0] and (trains or other_trains):
                calls.remove(mine)
                raise self._state.conflict(call, other, thread, other_trains)
        outer = self.timing
        timing = self.timing = timing or Timing()
        timing.begin_progress()
        try:
            yield timing
        finally:
            calls.remove(mine)
            timing.end("host" if outer.is_running else "idle")
            if outer.is_running:
                outer.inner_secs += timing.report()["total"]
                self.timing = outer

    @contextlib.contextmanager
    def validating(self, validator: Callable[[], dict[str, Any]] | None, sets: Sequence[str]) -> Iterator[None]:
        """Lets callbacks validate inside the block."""
        outer, self.validator, self.sets = (self.validator, self.sets), validator, sets
        try:
            yield
        finally:
            self.validator, self.sets = outer

    @contextlib.contextmanager
    def described(self, describe: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Lets callbacks ask for the arguments of the run inside the block."""
        outer, self.describe = self.describe, describe
        try:
            yield
        finally:
            self.describe = outer

    # --- for callbacks ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The state, for immediate reading only: the next train step may reuse its buffers."""
        return self._state.current

    @property
    def has_validation_data(self) -> bool:
        """Whether a `fit` with validation data is running, so that `model.validate` works."""
        return self.validator is not None

    @property
    def metric_directions(self) -> dict[str, str]:
        """The better direction, "max" or "min", of each log with a known direction."""
        directions = {"loss": "min", **self._configuration.metrics.directions}
        return directions | {f"{name}_{log}": direction for name in self.validation_sets
                             for log, direction in directions.items()}

    @property
    def validation_sets(self) -> Sequence[str]:
        """The names of the validation sets of the running `fit`; empty for sets without names."""
        return [name for name in self.sets if name]

    @property
    def keeps_averages(self) -> bool:
        """Whether `ema_decay` or the optimizer keeps averages of the weights."""
        return self._state.is_built and self._state.state_or_shapes.keeps_averages

    @property
    def shows_averages(self) -> bool:
        """Whether `get_weights` and `save_weights` use the averages; may be assigned."""
        return self._state.shows_averages

    @shows_averages.setter
    def shows_averages(self, value: bool) -> None:
        self._state.shows_averages = value

    def showing_averages(self) -> contextlib.AbstractContextManager[None]:
        """Lets `get_weights` and `weights` in the block use the averages, if the model keeps them."""
        return self._state.showing_evaluated()

    def adopt_averages(self) -> None:
        """Replaces the weights with the averages kept by `ema_decay` or an averaging optimizer."""
        self._state.adopt_averages()

    def description(self) -> dict[str, Any]:
        """Returns the arguments and the data of a starting `fit`, as plain data by name."""
        return self.describe() if self.describe else {}

    def begin_save(self, filepath: str | os.PathLike[str]) -> None:
        """Starts writing the state of `Model.save` to Orbax's files; see `trainer.callbacks.RunDetails`."""
        with self.timing.checkpoint:
            if self._writer is None:
                self._writer = CheckpointWriter()
            saved_model.begin_save(self._writer, checked_path("filepath", filepath), self._state.current,
                                   self._state.inputs, as_orbax=True)

    def wait_for_save(self) -> None:
        """Waits until all started saves are written."""
        if self._writer is not None:
            with self.timing.checkpoint:
                self._writer.wait()

    def train_step_flops(self) -> float | None:
        """Returns the FLOPs of a train step over all devices; None for an eager step, and before the step is traced."""
        phase = self._configuration.phases.get("train")
        flops = None if phase is None else phase.step_flops
        return None if flops is None else flops * self._strategy.num_replicas_in_sync

    def train_step_text(self) -> str | None:
        """Returns the XLA text of the compiled train step; None before it is compiled."""
        phase = self._configuration.phases.get("train")
        return None if phase is None else phase.compiled_text()
