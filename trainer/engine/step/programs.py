"""The compiled programs of a phase, by the shape of a group of batches and, for a few counts, the number of steps."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax

from trainer.core.compile.compiler_options import CompilerOptions
from trainer.core.compile.jit import begin_compiling, compile_lowered
from trainer.core.compile.recompilation_guard import CompileGuard, difference
from trainer.core.recently_used import RecentlyUsed
from trainer.core.timing import Timing
from trainer.data.resident import batch_at, stack_length
from trainer.data.sources.arrays import DataError
from trainer.data.stream import named
from trainer.distribute import Strategy
from trainer.distribute.placement.placement import PlacedGroup
from trainer.engine.step.gathered_rows import gathered_bytes, log_gathered
from trainer.engine.step.running_logs import RunningLogs
from trainer.engine.step.step_functions import MAX_PROGRAMS, StepFunctions

KNOWN_COUNTS = 2  # constant step counts per shape: of a whole execution, and of the last execution of an epoch


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
        self.compiled: RecentlyUsed[Any, Any] = RecentlyUsed(MAX_PROGRAMS)
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
        program = self.compiled.use(key)
        if program is None:
            lowered = self._lowered(key, running, group, guard, timing)
            with timing.compile:
                program = self.compiled[key] = compile_lowered(lowered, self._options)
                self._log_gathered(program, group)
        elif isinstance(program, concurrent.futures.Future):
            with timing.compile:
                program = self.compiled[key] = program.result()
        return program

    def begin(self, running: tuple[RunningLogs, ...], group: PlacedGroup, steps: int, guard: CompileGuard,
              timing: Timing) -> None:
        """Starts to compile the result of `get` for the same arguments in a thread."""
        key = self._key(group, steps)
        if key not in self.compiled:
            lowered = self._lowered(key, running, group, guard, timing)
            self.compiled[key] = begin_compiling(lowered, self._options)

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

    def _key(self, group: PlacedGroup, steps: int) -> tuple[Any, int | None]:
        """Returns the key of a program, with the step count if the program is specialized on it."""
        if not self.specializes_on_step_count or steps == 1 or stack_length(group.data) == 1:
            return group.spec, None  # a loop of a single iteration would be removed, and rounds differently
        # While the consumer waits, a pipeline yields groups of any length.
        known = [count for spec, count in self.compiled if spec == group.spec and count is not None]
        return group.spec, steps if steps in known or len(known) < KNOWN_COUNTS else None

    def _lowered(self, key: tuple[Any, int | None], running: tuple[RunningLogs, ...], group: PlacedGroup,
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
