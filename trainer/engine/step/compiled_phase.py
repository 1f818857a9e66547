"""A phase of a run, such as training: its step, traced on a first batch, with its programs and its logs."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from trainer.core.compile.compiler_options import CompilerOptions
from trainer.core.compile.cost_analysis import Cost, cost_of
from trainer.core.compile.jit import begin_compiling, compile_lowered, compiling
from trainer.core.compile.recompilation_guard import CompileGuard, difference
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState, shapes_of
from trainer.core.types import PyTree
from trainer.data.resident import batch_at, stack_length
from trainer.data.sources.arrays import DataError, shapes_key
from trainer.data.sources.groups import Group
from trainer.data.stream import named
from trainer.distribute import Strategy
from trainer.distribute.placement.placement import PlacedGroup, retried, to_devices
from trainer.engine.step import running_logs, steps
from trainer.engine.step.fusing import affordable_steps
from trainer.engine.step.gathered_rows import gathered_bytes, log_gathered
from trainer.engine.step.lowering import WhyNotReplicated
from trainer.engine.step.running_logs import RunningLogs
from trainer.engine.step.step_functions import MAX_PROGRAMS, StepFunctions

KNOWN_COUNTS = 2  # constant step counts per shape: of a whole execution, and of the last execution of an epoch


class CompiledPhase:
    """A phase's step, compiled over a strategy's mesh.

    Args:
      user_step: the model's `train_step`, `test_step` or `predict_step`.
      strategy: the mesh, the placement and the reduction.
      steps_per_execution: number of steps per execution; "auto" decides by the step's cost.
      eager: whether the step runs uncompiled, operation by operation.
      why_not_replicated: returns the reason why a step cannot be replicated, from the shapes of the state and of a
        batch; None if it can. By default, no step is replicated.
      compile_guard: the reaction to avoidable compilations; see `CompileGuard`.
      deterministic: whether its programs give the same bits in each run; see `compiler_options`.

    Attributes:
      steps_per_execution: see above; for "auto", the last decision of `trace`.
      empty_logs: the running logs of an epoch without steps.
      log_names: the names of the logs.
      constants: the values that the step has read from other models.
      programs: the compiled programs.
      is_asynchronous: whether the batches of an execution are trained concurrently, so that per-batch hooks are called
        for whole executions.
    """

    is_asynchronous = False

    def __init__(
        self, kind: str, user_step: steps.Step, strategy: Strategy, steps_per_execution: int | str, eager: bool,
        compile_guard: str | int = "off", deterministic: bool = False,
        why_not_replicated: WhyNotReplicated | None = None,
    ):
        self._kind, self._strategy, self._eager = kind, strategy, eager
        self._requested = 1 if eager else steps_per_execution
        self._compile_guard = compile_guard
        self._functions = StepFunctions(kind, user_step, strategy, eager, why_not_replicated)
        self.constants = self._functions.constants
        self.programs = Programs(kind, self._functions, strategy, strategy.compiler_options(deterministic))
        self._first_shapes: Any = None  # of the first batch
        self._steps_by_shapes: dict[Any, int] = {}  # to fuse; of batches of the shapes that were traced
        self._cost: Callable[[], Cost] | None = None  # of a step
        self._lowered_text: Callable[[], str] | None = None  # of a step, before XLA compiles it
        self._results: Any = None  # a compiled function, after `trace`
        self.steps_per_execution = 1
        self.empty_logs: Any = None
        self.log_names: tuple[str, ...] = ()

    # --- a step, before it is compiled -----------------------------------------------------------------------------

    def trace(self, state: TrainState, batch: PyTree) -> None:
        """Traces a step on the shapes of a host batch, so that invalid data are rejected before it compiles.

        It sets `steps_per_execution`, and the first time `empty_logs` and `log_names`. The number of steps that "auto"
        fuses depends on the size of the batch and the cost of the program, never on a clock, so a resumed run decides
        the same. An eager step runs instead, because its code need not be traceable.

        Args:
          state: the state, or its shapes.
          batch: the first batch of a run.
        """
        spec = shapes_key(batch)
        if spec not in self._steps_by_shapes:
            self._functions.set_state_shapes(state)
            rows = steps.rows_of(batch)
            stack = jax.tree.map(lambda leaf: np.array(leaf)[None], batch)
            placed = self.place_group(Group(stack, count=1, rows=rows, first=0)).data
            if self._eager:
                shapes, cost = self._functions.one_step(rows, state, placed), None
            else:
                traced = self._functions.traced_step(rows, placed)
                shapes, cost = traced.out_info, functools.cache(lambda: self._cost_of_replica(traced.jaxpr, batch))
                self._lowered_text = self._lowered_text or (lambda: traced.lower().as_text())
            if self._first_shapes is None:
                self._first_shapes, self._cost = shapes_of(batch), cost
            if self.empty_logs is None and self._kind != "predict":
                self._learn_logs(shapes[1] if self._kind == "train" else shapes[0])
            added = (placed, shapes) if self._kind == "predict" else placed
            self._steps_by_shapes[spec] = (
                self._steps_to_fuse(cost, added) if self._requested == "auto" else int(self._requested))
        self.steps_per_execution = self._steps_by_shapes[spec]

    @property
    def partitioned_because(self) -> str | None:
        """The reason why the step on a first batch is partitioned; None if it is replicated."""
        return self._functions.why_partitioned(self._first_shapes)

    @property
    def step_cost(self) -> Cost | None:
        """The cost of a step for a replica; None if it is eager."""
        return None if self._cost is None else self._cost()

    @property
    def step_flops(self) -> float | None:
        """The floating-point operations of a step for a replica; None if it is eager."""
        return None if self.step_cost is None else self.step_cost.flops

    def lowered_text(self) -> str | None:
        """Returns the text of the step for the first batch, before XLA compiles it; None if it is eager."""
        return None if self._lowered_text is None else self._lowered_text()

    def _cost_of_replica(self, program: ClosedJaxpr, batch: PyTree) -> Cost:
        cost = cost_of(program)
        is_replicated = self._functions.why_partitioned(batch) is None
        return cost if is_replicated else cost.divided_by(self._strategy.num_replicas_in_sync)

    def _steps_to_fuse(self, cost: Callable[[], Cost] | None, stacked: PyTree) -> int:
        assert cost is not None, "an eager step is not fused"
        return affordable_steps(cost(), stacked, self._strategy.is_on_cpu)

    # --- logs ------------------------------------------------------------------------------------------------------

    def _learn_logs(self, shapes: PyTree) -> None:
        empty = running_logs.empty_running_logs(shapes)
        self.empty_logs = to_devices(empty, self._strategy.logs_sharding)
        self.log_names = tuple(jax.eval_shape(running_logs.results, empty))
        if not self._strategy.is_described:
            self._results = compiling(running_logs.results, _of_one_device(self.empty_logs))

    def fetch_results(self, running: RunningLogs) -> dict[str, Any]:
        """Returns the values of an execution's running logs on the host, after waiting for the steps.

        They are floats, or numpy arrays if a metric has several values.
        """
        return on_host(self.begin_results(running))

    def begin_results(self, running: RunningLogs) -> dict[str, jax.Array]:
        """Returns the values of running logs, which are computed and sent to the host in the background."""
        values = self._results(_of_one_device(running))
        for value in jax.tree.leaves(values):
            value.copy_to_host_async()
        return values

    def store_metrics(self, running: RunningLogs) -> None:
        """Gives metric objects their state in running logs, which Keras's metrics have after a run."""
        for metric, accumulators in running_logs.metrics_of(jax.device_get(_of_one_device(running))):
            for variable, value in zip(metric.variables, accumulators, strict=True):
                variable.assign(value)

    # --- executions ------------------------------------------------------------------------------------------------

    def place_group(self, group: Group, arrays: Any = None) -> PlacedGroup:
        """Returns a group of batches placed on the devices; see `Strategy.place_group`."""
        return self._strategy.place_group(group, arrays)

    def new_guard(self, shapes: int) -> CompileGuard:
        """Returns a guard of the compilations of a run over data of some shapes."""
        return CompileGuard(self._compile_guard, f"{self._kind} step", shapes)

    @property
    def precompiles_in_background(self) -> bool:
        """Whether to compile later programs while others run: not on CPUs, whose cores are busy compiling."""
        return self.programs.specializes_on_step_count and not self._eager and not self.is_asynchronous

    def executable(
        self, *running: Any, group: PlacedGroup, guard: CompileGuard, timing: Timing, start: int = 0,
        stop: int | None = None,
    ) -> Callable[..., Any]:
        """Returns a function `(state, *running)` that runs the batches of `group` from `start` to `stop`.

        It returns the results of `steps.train_group`, `test_group` or `predict_group`. The first group of its shapes
        compiles, which `guard` counts and `timing` measures. Train steps donate their state: its buffers are invalid
        afterwards.

        Args:
          *running: the running logs; none for "predict".
          group: the group to run.
          start: the index of the first batch in `group`.
          stop: the index after the last batch; None for all.

        Raises:
          RuntimeError: if it has to compile and the guard forbids it.
          FloatingPointError: from the function, for values that `jax_debug_nans` and `jax_debug_infs` detect.
        """
        stop = group.count if stop is None else stop
        if self._eager:
            execute = self._functions.function(group.rows, stack_length(group.data) > 1, None)
        else:
            execute = self.programs.get(running, group, stop - start, guard, timing)
        place = self._strategy.place_number
        return functools.partial(self._run, execute, (group.data, place(start), place(stop)), group.first + start)

    def precompile(
        self, *running: Any, group: PlacedGroup, guard: CompileGuard, timing: Timing, steps: int = 1
    ) -> None:
        """Starts to compile, in a thread, the result of `executable` for some steps of groups like `group`."""
        self.programs.begin(running, group, steps, guard, timing)

    def lowered(self, batch: PyTree, steps: int | None = None) -> Any:
        """Returns an execution, lowered for compilation: a `jax.stages.Lowered`.

        Args:
          batch: a host batch that was passed to `trace`.
          steps: number of steps. By default a single step, with capacity for a second if steps are fused.
        """
        capacity = min(self.steps_per_execution, 2) if steps is None else steps
        stack = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (capacity, *leaf.shape)), batch)
        group = self.place_group(Group(stack, steps or 1, jax.tree.leaves(batch)[0].shape[0], first=0))
        running = () if self._kind == "predict" else (self.empty_logs,)
        is_constant = self.programs.specializes_on_step_count and not self._eager and capacity > 1
        return self.programs.lowered(running, group, steps if is_constant else None)

    def compiled_text(self) -> str | None:
        """Returns the XLA text of the first compiled program; None without programs."""
        return self.programs.compiled_text()

    def _run(self, execute: Callable[..., Any], rest: tuple[Any, ...], first: int, state: TrainState,
             *running: Any) -> Any:
        if self.constants.are_stale:
            raise RuntimeError(
                f"The {self._kind} step reads the weights of another model, which have changed since the run began, "
                "and are constants of the compiled step. Change them between runs, where the step is compiled again, "
                "or make both models one: `Model({\"student\": ..., \"teacher\": ...})`, with a `train_step`.")
        try:
            # Uncompiled code may have other effects, which must not be repeated.
            return execute(state, *running, *rest) if self._eager else retried(execute, state, *running, *rest)
        except Exception as error:
            if type(error).__name__ != "InternalFloatingPointError":  # it has no public name
                raise
            raise FloatingPointError(
                f"A {self._kind} step from batch {first} on gave a value that is not finite, which JAX was told to "
                "look for (`jax_debug_nans`, `jax_debug_infs`). `compile(run_eagerly=True)` shows in which operation; "
                "without these options, `TerminateOnNaN` names the batches and the weights.") from error


def on_host(values: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the results of `CompiledPhase.begin_results` as floats, or numpy arrays for several values."""
    fetched = jax.device_get(values)
    return {name: float(value) if np.ndim(value) == 0 else value for name, value in fetched.items()}


def _of_one_device(running: running_logs.RunningLogs) -> running_logs.RunningLogs:
    # Each device has them whole, so any process can use them alone.
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), running)


class Programs:
    """The compiled programs of a phase: the `MAX_PROGRAMS` last used. A dropped program is compiled again when needed.

    Args:
      functions: the functions to compile.
      options: options for XLA.

    Attributes:
      compiled: programs, or futures of programs, by the shapes of a group and the number of steps, if it is constant.
      count: number of programs that were compiled, or are being compiled, dropped programs included.
      specializes_on_step_count: whether the number of steps is a constant of a program.
    """

    def __init__(self, kind: str, functions: StepFunctions, strategy: Strategy, options: CompilerOptions):
        self.functions = functions
        self._kind, self._strategy, self._options = kind, strategy, options
        self.specializes_on_step_count = not strategy.is_on_cpu  # a loop on CPU does not wait for the host
        self.compiled: collections.OrderedDict[Any, Any] = collections.OrderedDict()  # the last used is the last
        self.count = 0
        self._seen: set[Any] = set()  # the keys of all programs
        self._last: Any = None  # the shapes of the last batch that was lowered
        self._has_logged_gathers = False

    def get(self, running: tuple[RunningLogs, ...], group: PlacedGroup, steps: int,
            guard: CompileGuard, timing: Timing) -> Callable[..., Any]:
        """Returns the program that runs some steps of groups like `group`, and compiles it if needed.

        Args:
          running: the running logs, as a tuple; empty for "predict".
          steps: number of steps.
          guard: counts the compilation.
          timing: measures it.

        Raises:
          RuntimeError: if it has to compile and the guard forbids it.
        """
        key = self._key(group, steps)
        with contextlib.suppress(KeyError):  # there is none; or another thread drops it
            self.compiled.move_to_end(key)
        program = self.compiled.get(key)
        if program is None:
            lowered = self._newly_lowered(key, running, group, guard, timing)
            with timing.compile:
                program = compile_lowered(lowered, self._options)
                self._keep(key, program)
                self._log_gathered(program, group)
        elif isinstance(program, concurrent.futures.Future):
            with timing.compile:
                program = program.result()
                self._keep(key, program)
        return program

    def begin(self, running: tuple[RunningLogs, ...], group: PlacedGroup, steps: int, guard: CompileGuard,
              timing: Timing) -> None:
        """Starts to compile the result of `get` for the same arguments in a thread."""
        key = self._key(group, steps)
        if key not in self.compiled:
            lowered = self._newly_lowered(key, running, group, guard, timing)
            self._keep(key, begin_compiling(lowered, self._options))

    def lowered(self, running: tuple[RunningLogs, ...], group: PlacedGroup, count: int | None) -> Any:
        """Returns the program of a group as a `jax.stages.Lowered`; of `count` steps, if the count is constant."""
        bounds = map(self._strategy.place_number, (0, group.count))
        traced = self.functions.function(group.rows, stack_length(group.data) > 1, count).trace(
            self.functions.state_shapes, *running, group.data, *bounds)
        self._strategy.check_axes(self.functions.state_shapes, traced.jaxpr)
        return traced.lower()

    def compiled_text(self) -> str | None:
        """Returns the XLA text of the first program; None without programs."""
        for program in self.compiled.values():
            is_begun = isinstance(program, concurrent.futures.Future)
            return (program.result() if is_begun else program).as_text()
        return None

    def _keep(self, key: Any, program: Any) -> None:
        self.compiled[key] = program
        while len(self.compiled) > MAX_PROGRAMS:
            self.compiled.popitem(last=False)

    def _key(self, group: PlacedGroup, steps: int) -> tuple[Any, int | None]:
        """Returns the key of a program, with the step count if the program is specialized on it."""
        if not self.specializes_on_step_count or steps == 1 or stack_length(group.data) == 1:
            return group.spec, None  # a loop of a single iteration would be removed, and rounds differently
        # While the consumer waits, a pipeline yields groups of any length.
        known = [count for spec, count in self.compiled if spec == group.spec and count is not None]
        return group.spec, steps if steps in known or len(known) < KNOWN_COUNTS else None

    def _newly_lowered(self, key: tuple[Any, int | None], running: tuple[RunningLogs, ...], group: PlacedGroup,
                       guard: CompileGuard, timing: Timing) -> Any:
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((group.rows, *leaf.shape[1:]), leaf.dtype),
                             jax.eval_shape(lambda stack: batch_at(stack, 0), group.data))
        with timing.compile:
            try:
                lowered = self.lowered(running, group, key[1])
            except Exception as error:
                if self._last is None or self._last == batch:
                    raise
                raise named(DataError(f"{difference(self._last, batch)}, which the {self._kind} step cannot take. It "
                                      f"raised {type(error).__name__}: {error}"), group.first) from error
        guard.check(batch, group.first)
        if key in self._seen:
            guard.report_dropped(group.first, MAX_PROGRAMS)
        self._seen.add(key)
        self.count += 1
        self._last = batch
        return lowered

    def _log_gathered(self, program: Any, group: PlacedGroup) -> None:
        replicas = self._strategy.num_replicas_in_sync
        if not self._has_logged_gathers and replicas > 1 and group.rows % replicas == 0 and (
                self.functions.why_partitioned(jax.eval_shape(lambda: batch_at(group.data, 0))) is not None):
            self._has_logged_gathers = True
            shapes = {leaf.shape for leaf in jax.tree.leaves(self.functions.state_shapes)}
            log_gathered(self._kind, gathered_bytes(program.as_text(), shapes))
