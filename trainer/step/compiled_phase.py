"""A phase of a run, such as training: its step, traced, sized and compiled over a strategy's mesh.

A compiled phase is one function that serves every group of batches of one shape; another shape, such as an uneven last
batch, compiles once more. How many steps are fused into one execution is decided here.

A step is a function of the whole batch, and has one of two lowerings, with the same numbers. Replicated: each replica
computes its rows, and gradients are averaged before the update. Partitioned: one program, as for one device, that XLA
divides. What is known to treat rows apart is replicated; see `lowering.py`.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from trainer.compile.cost_analysis import Cost, cost_of
from trainer.compile.jit import begin_compiling, compile_lowered, compiled, compiling
from trainer.compile.recompilation_guard import CompileGuard
from trainer.compile.traces.cpu_conv_layout import with_fast_convolutions
from trainer.compile.traces.late_gathers import with_late_gathers
from trainer.compile.traces.passed_through import first_passed_through
from trainer.compile.traces.row_bits import UnlikeDraws, with_bits_of_rows
from trainer.compile.traces.undivided import with_undivided_axes
from trainer.core import trace_purity
from trainer.core.replica_context import ReplicaContext, single_context
from trainer.core.timing import Timing
from trainer.core.train_state import shapes_of
from trainer.data.resident import batch_at, stack_length
from trainer.data.sources.batches import Group
from trainer.distribute import Strategy
from trainer.distribute.placement.device_memory import retried
from trainer.distribute.placement.placement import REPLICA_AXIS, PlacedGroup, to_devices
from trainer.distribute.replica.partitioned import PartitionedContext
from trainer.distribute.replica.replicated_state import finalize_skipped_updates, run_on_replicas
from trainer.step import running_logs, steps
from trainer.step.fusing import affordable_steps
from trainer.step.gathered_rows import gathered_bytes, log_gathered
from trainer.step.lowering import Lowerings, WhyPartitioned, shapes_key


def _of_one_device(running: running_logs.RunningLogs) -> running_logs.RunningLogs:
    # What any process may do with them alone: each device has them whole.
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), running)


def on_host(values: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns what `CompiledPhase.begin_results` began, as floats, or numpy arrays where there are several values."""
    fetched = jax.device_get(values)
    return {name: float(value) if np.ndim(value) == 0 else value for name, value in fetched.items()}


KNOWN_COUNTS = 2  # of steps, which programs of one shape know: those of a whole execution, and of the last of an epoch

_ONE_BATCH: dict[str, Callable[..., Any]] = {
    "train": steps.train_one_batch, "test": steps.test_one_batch, "predict": steps.predict_one_batch}
_GROUP: dict[str, Callable[..., Any]] = {
    "train": steps.train_group, "test": steps.test_group, "predict": steps.predict_group}


class CompiledPhase:
    """One phase's step, compiled over a strategy's mesh.

    Args:
      kind: "train", "test" or "predict".
      user_step: the model's `train_step`, `test_step` or `predict_step`.
      strategy: the mesh, the placement and the reduction.
      steps_per_execution: how many steps go into one execution; "auto" decides by the step's cost.
      eager: whether the step runs uncompiled, operation by operation.
      why_partitioned: returns why a step cannot be replicated, from the shapes of the state and of a batch; None if it
        can. By default none is.
      compile_guard: what is done about compilations that the data did not need; see `CompileGuard`.
      deterministic: whether its programs give the same bits each time; see `compiler_options`.

    Attributes:
      steps_per_execution: see above; of "auto", what `prepare` decided for the last batch that it was given.
      partitioned_because: why the step on a first batch is partitioned; None if it is replicated.
      empty_logs: the running logs of an epoch without steps.
      log_names: the names of the logs.
      compiles_beside: whether programs that will be needed are to be compiled while others run.
      is_asynchronous: whether the batches of an execution are trained side by side, so that hooks of single batches
        are called for whole executions.
    """

    is_asynchronous = False

    def __init__(
        self, kind: str, user_step: steps.Step, strategy: Strategy, steps_per_execution: int | str, eager: bool,
        compile_guard: str = "off", deterministic: bool = False, why_partitioned: WhyPartitioned | None = None,
    ):
        self._kind = kind
        self._strategy = strategy
        self._eager = eager
        self._requested = 1 if eager else steps_per_execution
        self._lowerings = Lowerings(kind, strategy, why_partitioned)
        self._state_shapes: Any = None
        self._first_batch: Any = None  # its shapes
        self._constants = trace_purity.Constants()
        one_batch = functools.partial(self._noting_constants, _ONE_BATCH[kind], user_step)
        self._eager_step = functools.partial(_ONE_BATCH[kind], user_step, single_context)
        # Compiled on their own so that their traces, the costly part, are shared by all that is built on them.
        self._whole_batch = self._shared(
            functools.partial(one_batch, functools.partial(PartitionedContext, strategy)),
            *[functools.partial(with_undivided_axes, mesh=strategy.mesh)] * (strategy.mesh.size > 1))
        self._of_replica = self._shared(
            functools.partial(one_batch, self._replica_context),
            functools.partial(with_bits_of_rows, axis_name=REPLICA_AXIS), *[with_late_gathers] * strategy.gathers_late)
        self._compile_guard = compile_guard
        self._knows_counts = not (eager or strategy.is_on_cpu)  # a CPU's loop does not wait for the host
        self.compiles_beside = self._knows_counts and not self.is_asynchronous  # CPUs' cores compile, too
        self._compiler_options = strategy.compiler_options(deterministic)
        self._executions: dict[tuple[int, bool, int | None], Callable[..., Any]] = {}  # by rows, fused, and count
        self._executables: dict[Any, Any] = {}  # these compiled, by the shapes of a group and the count of steps
        self._affordable: dict[Any, int] = {}  # how many steps to fuse, by the shapes of a batch
        self._cost: Callable[[], Cost] | None = None  # of a step
        self._program: Callable[[], str] | None = None  # returns the text of a step
        self._results: Any = None  # a compiled function, once `prepare` has seen a batch
        self._state_shardings: Any = None
        self._kept: list[bool] | None = None  # of a state that rests on the host, which leaves no step changes
        self._logs_gathered = True
        self.steps_per_execution = 1
        self.empty_logs: Any = None
        self.log_names: tuple[str, ...] = ()

    def place_group(self, group: Group, arrays: Any = None) -> PlacedGroup:
        """Returns a group of batches placed on the devices; see `Strategy.place_group`."""
        return self._strategy.place_group(group, arrays)

    def prepare(self, state: Any, batch: Any, batch_rows: int = 0) -> None:
        """Traces a step on the shapes of a host batch, so that data it cannot take are rejected before it compiles.

        Args:
          state: the state, or its shapes.
          batch: the first batch of a run.
          batch_rows: how many rows its batches have as a rule; those of `batch`, if it has more.

        It sets `steps_per_execution`, and the first time `empty_logs` and `log_names`. How many steps "auto" fuses
        follows from the size of the batch and the cost of the program, never from a clock, so a resumed run decides
        the same. An eager step runs instead, as its code need not be traceable.
        """
        rows = steps.rows_of(batch)
        if self._state_shardings is None:
            self._state_shapes, self._state_shardings = shapes_of(state), self._strategy.state_shardings(state)
        spec = max(batch_rows, rows), shapes_key(batch)
        if spec not in self._affordable:
            stack = jax.tree.map(lambda leaf: np.array(leaf)[None], batch)
            group = self.place_group(Group(stack, count=1, rows=rows, first=0))
            one_step = functools.partial(self._one_step, rows)
            if self._eager:
                shapes, cost = one_step(state, group.data), None
            else:
                # As `executable` lowers it, whether there is a state or only its shapes: then it is not traced again.
                traced = compiled(one_step).trace(self._placed_shapes(state), group.data)
                shapes, cost = traced.out_info, functools.cache(lambda: self._cost_of_replica(traced.jaxpr, batch))
                if self._strategy.rests_on_host and self._kind == "train" and self._kept is None:
                    self._kept = first_passed_through(traced.jaxpr, len(jax.tree.leaves(state)))
                self._program = self._program or (lambda: traced.lower().as_text())
            if self._first_batch is None:
                self._first_batch, self._cost = shapes_of(batch), cost
            if self.empty_logs is None and self._kind != "predict":
                self._learn_logs(shapes[1] if self._kind == "train" else shapes[0])
            placed = (group.data, shapes) if self._kind == "predict" else group.data
            self._affordable[spec] = (
                self._affordable_steps(cost, placed) if self._requested == "auto" else int(self._requested))
        self.steps_per_execution = self._affordable[spec]

    @property
    def partitioned_because(self) -> str | None:
        return self._why(self._first_batch)

    def _cost_of_replica(self, program: Any, batch: Any) -> Cost:
        cost = cost_of(program)
        return cost if self._why(batch) is None else cost.divided_by(self._strategy.num_replicas_in_sync)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled, or are being compiled."""
        return len(self._executables)

    @property
    def has_stale_constants(self) -> bool:
        """Whether the step has read weights of another model, which have changed since."""
        return self._constants.are_stale

    @property
    def step_flops(self) -> float | None:
        """How many floating-point operations a replica has in one step; None if it is eager."""
        return None if self.step_cost is None else self.step_cost.flops

    @property
    def step_cost(self) -> Cost | None:
        """What a replica computes in one step; None as of `step_flops`."""
        return None if self._cost is None else self._cost()

    def program(self) -> str | None:
        """Returns the text of the step for the first batch that `prepare` has seen, before XLA compiles it.

        None for an eager step, which has no program.
        """
        return None if self._program is None else self._program()

    def _learn_logs(self, shapes: Any) -> None:
        empty = running_logs.empty_running_logs(shapes)
        self.empty_logs = to_devices(empty, self._strategy.logs_sharding)
        self.log_names = tuple(jax.eval_shape(running_logs.results, empty))
        if not self._strategy.is_described:
            self._results = compiling(running_logs.results, _of_one_device(self.empty_logs))

    def _affordable_steps(self, cost: Callable[[], Cost] | None, stacked: Any) -> int:
        assert cost is not None, "an eager step is not fused"
        return affordable_steps(cost(), stacked, self._strategy.is_on_cpu)

    def lowered(self, state: Any, batch: Any, steps: int | None = None) -> Any:
        """Returns an execution, lowered for compilation: a `jax.stages.Lowered`.

        Args:
          state: a state of arrays, or of shapes as `jax.ShapeDtypeStruct`s, of which nothing is allocated.
          batch: a host batch, which `prepare` has seen.
          steps: of how many steps. By default of one, with room for a second if steps are fused.
        """
        capacity = min(self.steps_per_execution, 2) if steps is None else steps
        stack = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (capacity, *leaf.shape)), batch)
        group = self.place_group(Group(stack, steps or 1, jax.tree.leaves(batch)[0].shape[0], first=0))
        running = () if self._kind == "predict" else (self.empty_logs,)
        bounds = [self._strategy.place_number(number) for number in (0, steps or 1)]
        count = steps if self._knows_counts and capacity > 1 else None
        return self._execution(group.rows, capacity > 1, count).lower(
            self._placed_shapes(state), *running, group.data, *bounds)

    def _placed_shapes(self, state: Any) -> Any:
        def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            weak_type = getattr(leaf, "weak_type", False)  # random keys have none
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)

        return jax.tree.map(placed, state, self._state_shardings)

    def fetch_results(self, running: Any) -> dict[str, Any]:
        """Returns the values of running logs, as an execution returned them, on the host.

        They are floats, or numpy arrays where a metric has several values. Waits for the steps that the logs are of.
        """
        return on_host(self.begin_results(running))

    def begin_results(self, running: Any) -> dict[str, jax.Array]:
        """Returns the values of running logs, which are being computed and sent to the host; does not wait for them."""
        values = self._results(_of_one_device(running))
        for value in jax.tree.leaves(values):
            value.copy_to_host_async()
        return values

    def store_metrics(self, running: Any) -> None:
        """Gives metric objects the state that running logs have of them, as Keras's have it after a run."""
        for metric, accumulators in running_logs.metrics_of(jax.device_get(_of_one_device(running))):
            for variable, value in zip(metric.variables, accumulators, strict=True):
                variable.assign(value)

    def new_guard(self) -> CompileGuard:
        """Returns what watches over the compilations of one run."""
        return CompileGuard(self._compile_guard, f"{self._kind} step")

    def executable(
        self, state: Any, *running: Any, group: PlacedGroup, guard: CompileGuard, timing: Timing, start: int = 0,
        stop: int | None = None,
    ) -> Callable[..., Any]:
        """Returns the function `(state, *running)` that runs the batches from `start` to `stop` of `group`, or all.

        It returns what `step.train_group`, `test_group` or `predict_group` do. Compiles, if there was no group of these
        shapes before, which `guard` counts and `timing` measures. Train steps donate the state that they are given:
        its buffers are gone afterwards.

        Args:
          state: a state of arrays, or of shapes as `jax.ShapeDtypeStruct`s.
          *running: the running logs; none to predict.
          group: what will run.
          guard: see above.
          timing: see above.
          start: the first batch of `group`.
          stop: the number after that of the last batch; None for all.

        Raises:
          RuntimeError: if it has to compile and the guard forbids it.
          FloatingPointError: from the function, for what `jax_debug_nans` and `jax_debug_infs` make JAX look for.
        """
        stop = group.count if stop is None else stop
        if self._eager:
            execute = self._execution(group.rows, stack_length(group.data) > 1, None)
        else:
            key = self._key(group, stop - start)
            execute = self._executables.get(key)
            if execute is None:
                lowered = self._lowered(key, state, running, group, guard, timing)
                with timing.measure("compile"):
                    execute = self._executables[key] = compile_lowered(lowered, self._compiler_options)
                    self._log_gathered(execute, state, group)
            elif isinstance(execute, concurrent.futures.Future):
                with timing.measure("compile"):
                    execute = self._executables[key] = execute.result()
        return functools.partial(self._run, execute, self._rest(group, start, stop), group.first + start)

    def _log_gathered(self, execute: Any, state: Any, group: PlacedGroup) -> None:
        replicas = self._strategy.num_replicas_in_sync
        if self._logs_gathered and replicas > 1 and group.rows % replicas == 0 and (
                self._why(jax.eval_shape(lambda: batch_at(group.data, 0))) is not None):
            self._logs_gathered = False
            log_gathered(self._kind, gathered_bytes(execute.as_text(), {leaf.shape for leaf in jax.tree.leaves(state)}))

    def compile_beside(
        self, state: Any, *running: Any, group: PlacedGroup, guard: CompileGuard, timing: Timing, steps: int = 1
    ) -> None:
        """Begins to compile, in a thread, what `executable` will return for some steps of groups like `group`.

        Args:
          state, *running, group, guard, timing: as of `executable`.
          steps: how many steps.
        """
        key = self._key(group, steps)
        if key not in self._executables:
            lowered = self._lowered(key, state, running, group, guard, timing)
            self._executables[key] = begin_compiling(lowered, self._compiler_options)

    def _key(self, group: PlacedGroup, steps: int) -> tuple[Any, int | None]:
        fused = stack_length(group.data) > 1
        return group.spec, self._known_count(group, steps) if fused and self._knows_counts else None

    def _rest(self, group: PlacedGroup, start: int, stop: int) -> tuple[Any, ...]:
        place = self._strategy.place_number
        return group.data, place(start), place(stop)

    def _lowered(self, key: tuple[Any, int | None], state: Any, running: Any, group: PlacedGroup, guard: CompileGuard,
                 timing: Timing) -> Any:
        batch = jax.eval_shape(lambda stack: batch_at(stack, 0), group.data)
        guard.check(jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((group.rows, *leaf.shape[1:]), leaf.dtype), batch), group.first)
        with timing.measure("compile"):
            return self._execution(group.rows, stack_length(group.data) > 1, key[1]).lower(
                self._placed_shapes(state), *running, *self._rest(group, 0, group.count))

    def _known_count(self, group: PlacedGroup, steps: int) -> int | None:
        """Returns how many steps a program knows that it has; None for one that serves any number of them."""
        known = [count for spec, count in self._executables if spec == group.spec and count is not None]
        # A loop of one turn would be none, and a pipeline that is waited for has groups of any length.
        return steps if steps > 1 and (steps in known or len(known) < KNOWN_COUNTS) else None

    def _run(self, execute: Callable[..., Any], rest: Any, first: int, state: Any, *running: Any) -> Any:
        if self.has_stale_constants:
            raise RuntimeError(
                f"The {self._kind} step reads the weights of another model, which have changed since the run began, "
                "and are constants of the compiled step. Change them between runs, where the step is compiled again, "
                "or make both models one: `Model({\"student\": ..., \"teacher\": ...})`, with a `train_step`.")
        try:
            # Code that runs operation by operation may do other things, too, which are not to be done again.
            return execute(state, *running, *rest) if self._eager else retried(execute, state, *running, *rest)
        except Exception as error:
            if type(error).__name__ != "InternalFloatingPointError":  # it has no public name
                raise
            raise FloatingPointError(
                f"A {self._kind} step from batch {first} on gave a value that is not finite, which JAX was told to "
                "look for (`jax_debug_nans`, `jax_debug_infs`). `compile(run_eagerly=True)` shows in which operation; "
                "without these options, `TerminateOnNaN` names the batches and the weights.") from error

    def text(self) -> str | None:
        """Returns the first program that was compiled, as XLA's text; None if there is none."""
        for executable in self._executables.values():
            is_begun = isinstance(executable, concurrent.futures.Future)
            return (executable.result() if is_begun else executable).as_text()
        return None

    def _noting_constants(self, one_batch: Callable[..., Any], *arguments: Any) -> Any:
        with trace_purity.noting(self._constants):
            return one_batch(*arguments)

    def _replica_context(self, rows: int) -> ReplicaContext:
        context = self._strategy.replica_context(rows, None)
        context.keys_differ = False
        return context

    def _shared(
        self, one_batch: Callable[..., Any], *rewrites: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[..., Any]:
        shared = compiled(one_batch)
        for rewrite in (*rewrites, *[with_fast_convolutions] * self._strategy.is_on_cpu):
            shared = compiled(rewrite(shared))
        return shared

    def _execution(self, rows: int, fused: bool, count: int | None) -> Any:
        """Returns the function that runs a group of batches of `rows` rows, to be compiled unless it is eager."""
        key = rows, fused, count
        if key not in self._executions:
            one_batch = functools.partial(self._one_batch, rows)
            run = functools.partial(_GROUP[self._kind], one_batch, fused, count=count)
            self._executions[key] = self._eager_execution(run) if self._eager else self._compiled_execution(run)
        return self._executions[key]

    def _execute(self, run: Callable[..., Any], state: Any, *rest: Any) -> Any:
        returned = run(self._on_devices(state), *rest)
        if self._kept is None:
            return returned
        after, structure = jax.tree.flatten(returned[0])  # what no step changes is not sent back
        leaves = zip(jax.tree.leaves(state), after, self._kept, strict=True)
        return (jax.tree.unflatten(structure, [old if is_kept else new for old, new, is_kept in leaves]), *returned[1:])

    def _eager_execution(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def execute(*arguments: Any) -> Any:
            returned = self._execute(run, *arguments)
            return (jax.device_put(returned[0], self._state_shardings), *returned[1:]) if self._kind == "train" else (
                returned)

        return execute

    def _compiled_execution(self, run: Callable[..., Any]) -> Any:
        strategy = self._strategy
        out_shardings = {"train": (self._state_shardings, strategy.logs_sharding), "test": strategy.logs_sharding,
                         "predict": strategy.outputs_sharding}
        # Running logs are not donated: a callback may read an earlier step's later.
        return compiled(functools.partial(self._execute, run), out_shardings[self._kind],
                        donate=(0,) if self._kind == "train" else ())

    def _why(self, batch: Any) -> str | None:
        """Returns why a step on a batch of such shapes is partitioned; None if it is replicated."""
        return self._lowerings.why_partitioned(self._state_shapes, batch)

    def _one_batch(self, rows: int, state: Any, batch: Any) -> Any:
        """Returns what one batch gives, of which the first `rows` rows are real; part of an execution."""
        placed_rows = steps.rows_of(batch)
        if rows != placed_rows:
            batch = jax.tree.map(lambda leaf: leaf[:rows], batch)
        if not self._eager and self._why(batch) is None:
            try:
                return self._on_replicas(state, batch)
            except UnlikeDraws as error:
                self._lowerings.partition(batch, str(error))
        if self._eager:  # operation by operation, XLA would divide those that it must not divide, too
            returned = self._eager_step(*jax.device_put((state, batch), self._strategy.logs_sharding))
        else:
            batch = self._strategy.with_rows_in_place(batch)
            with self._strategy.tracing_whole_batch():
                returned = self._whole_batch(state, batch)
        if self._kind == "predict" and rows != placed_rows:  # arrays outside of a program have equal parts
            returned = jax.tree.map(
                lambda leaf: jnp.pad(leaf, [(0, placed_rows - rows), *[(0, 0)] * (leaf.ndim - 1)]), returned)
        if self._kind != "train":
            return returned
        after = finalize_skipped_updates(state, returned[0])
        if not self._eager:
            after = self._strategy.with_state_in_place(after)
        return self._finished(state, after, *returned[1:])

    def _on_replicas(self, state: Any, batch: Any) -> Any:
        """Returns what one batch gives, each replica computing its rows of it."""
        strategy, is_train = self._strategy, self._kind == "train"

        def one_replica(state: Any, batch: Any) -> tuple[Any, ...]:
            returned = self._of_replica(state, batch)
            return ([(0, returned[0])], returned[1:]) if is_train else ([], returned)

        out_spec = strategy.rows_spec if self._kind == "predict" else PartitionSpec()
        states, (outputs,) = run_on_replicas(
            strategy, one_replica, state, (batch,), (strategy.rows_spec,), (out_spec,))
        return self._finished(state, states[0], *outputs) if is_train else outputs

    @staticmethod
    def _finished(before: Any, after: Any, step_logs: Any, rows: Any) -> Any:
        return after, steps.count_skipped_updates(before, after, step_logs), rows

    def _one_step(self, rows: int, state: Any, data: Any) -> Any:
        return self._one_batch(rows, self._on_devices(state), jax.tree.map(lambda leaf: leaf[0], data))

    def _on_devices(self, state: Any) -> Any:
        state = self._strategy.on_devices(state)
        return state if self._kind == "train" else state.averaged()
