"""A running phase: its compiled step, its batches on the devices, its clock.

Owns the start of a phase and the transfer of its batches to the devices. The loop decides when batches run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from trainer.callbacks.base.lazy_logs import LazyLogs
from trainer.core.compile.recompilation_guard import CompileGuard
from trainer.core.timing import Timing
from trainer.core.types import Phase
from trainer.data.prefetch import Demand, is_abandoned, prefetch
from trainer.data.reader import Reader
from trainer.data.resident import ResidentBatches, stack_length
from trainer.data.sources.groups import Group
from trainer.distribute.cluster import ClusterError
from trainer.distribute.placement.placement import PlacedGroup
from trainer.engine.model.core.model_core import ModelCore
from trainer.engine.step.compiled_phase import CompiledPhase, on_host
from trainer.engine.step.running_logs import RunningLogs

_NUMBERS_AT_ONCE = 2**18
_BATCHES_AT_ONCE = 2**13  # limit for callbacks that run batches one by one, because the devices keep the index of each


@dataclasses.dataclass(eq=False)
class RunningPhase:
    """Training, validation, evaluation or prediction, while it runs.

    Attributes:
      core: the model.
      compiled: the compiled step.
      passes: number of passes over the batches.
      data_on_device: whether `data_on_device=True` refers to these batches.
      guard: watches the compilations of the run.
      timing: the clock of the run.
      prefix: the first part of the names of its logs, such as "clean_" for one of several validation sets.
      arrays: the reader's arrays on the devices, if batches are gathered from them.
      index_batches: number of batches whose row indices are placed at once; None without `arrays`.
      values_are_checked: whether all values of the arrays on the devices are checked.
      in_flight: an array of each execution that may be unfinished, the oldest first.
      begun: the first group on the devices and the other groups, by epoch; see `look_ahead`.
    """

    core: ModelCore
    kind: Phase
    compiled: CompiledPhase
    reader: Reader
    passes: int
    data_on_device: bool
    guard: CompileGuard
    timing: Timing
    prefix: str = ""
    arrays: Any | None = None
    index_batches: int | None = None
    values_are_checked: bool = False
    in_flight: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)
    begun: dict[int, tuple[PlacedGroup, Iterator[Group]]] = dataclasses.field(default_factory=dict)

    def place_arrays(self) -> None:
        """Places the reader's arrays on the devices, if batches are to be gathered there, and checks their values."""
        core, reader = self.core, self.reader
        self.arrays = None  # with those begun, so that their memory is free
        self.begun.clear()
        with self.timing.data:
            self.arrays = core.arrays_to_gather_from(self.kind, reader, self.passes, self.data_on_device)
            self.values_are_checked = self.arrays is not None and _has_good_values(core, self.kind, reader)
        self.index_batches = None
        if self.arrays is not None:
            # Invalid values are reported when their execution is due, and all rows of a group are checked.
            self.index_batches = reader.group_size
            if self.values_are_checked:
                self.index_batches = _batches_at_once(reader.group_size, reader.batch_rows)

    def replace_stale_arrays(self) -> None:
        """Places the arrays again if the user has written to the reader's arrays since."""
        with self.timing.data:
            are_stale = (self.reader.arrays is not None
                         and self.core.strategy.has_stale_arrays(self.reader.arrays))
        if are_stale:
            self.place_arrays()

    def look_ahead(self, epoch: int) -> None:
        """Computes and places the first row indices of a later epoch while the devices run the current epoch.

        Nothing else is read ahead: a pipeline may depend on callbacks in between, and values may be invalid.
        """
        if self.arrays is not None and self.values_are_checked:
            with self.timing.data:
                groups = self.reader.read(epoch, 0, self.index_batches)
                self.begun[epoch] = self._to_devices(next(groups)), groups

    @contextlib.contextmanager
    def groups(self, epoch: int, batch: int = 0) -> Iterator[Iterator[PlacedGroup]]:
        """Yields an iterator of an epoch's groups as stacks on the devices, from a batch on.

        A thread reads ahead if that saves time. Only the loop gathers stacks, because all processes must do it in the
        same order.
        """
        if not self._reads_ahead:
            if batch == 0 and epoch in self.begun:
                first, groups = self.begun.pop(epoch)
                begun = itertools.chain([first], map(self._to_devices, groups))
                del first  # must not stay on the devices for the whole epoch
                yield self.stacks(begun)
            else:
                yield self.stacks(map(self._to_devices, self.reader.read(epoch, batch, self.index_batches)))
            return
        demand, spans_processes = Demand(), self.core.strategy.spans_processes

        def is_urgent() -> bool:
            # Several processes must run the same executions, so waiting must not end a group in any of them. A group
            # that will not be used ends at once, so that no thread continues the user's pipeline.
            return is_abandoned() or (not spans_processes and demand.is_urgent())

        with prefetch(self.reader.read(epoch, batch, is_urgent=is_urgent), self._to_devices, demand=demand) as placed:
            yield self.stacks(placed)

    def stacks(self, groups: Iterable[PlacedGroup]) -> Iterator[PlacedGroup]:
        """Yields placed groups as stacks for the compiled step; see `Strategy.stack_at`."""
        strategy = self.core.strategy
        for group in groups:
            batches = group.data
            if not isinstance(batches, ResidentBatches):
                yield group
                continue
            length = stack_length(batches.numbers) if self.arrays is None else self.reader.stack_capacity
            for start in range(0, group.count, length):
                # CPU devices run executions concurrently: two executions that exchange rows could deadlock.
                if strategy.is_on_cpu and not batches.are_whole and self.in_flight:
                    self.in_flight[-1].block_until_ready()
                yield strategy.stack_at(group, start, length)

    def _to_devices(self, group: Group) -> PlacedGroup:
        if not self.values_are_checked:
            rows = jax.tree.map(lambda leaf: leaf[:group.count], group.data)
            self.core.check_values(self.kind, self.reader.rows_at(rows) if self.arrays is not None else rows)
        return self.compiled.place_group(group, self.arrays)

    @property
    def _reads_ahead(self) -> bool:
        """Whether a thread reads and places groups, alongside the loop."""
        if self.reader.arrays is None:
            return True
        # Row indices are placed quickly, and a single group leaves nothing to place ahead. CPU devices compute on the
        # same cores while the loop gathers the next rows: a thread would only compete for the interpreter.
        batches = self.reader.num_batches
        is_single = batches is not None and batches <= self.reader.group_size
        return self.arrays is None and not is_single and not self.core.strategy.is_on_cpu

    @property
    def log_names(self) -> list[str]:
        """The names of the logs."""
        return [self.prefix + name for name in self.compiled.log_names]

    def lazy_logs(self, running: RunningLogs) -> LazyLogs:
        """Returns logs that are fetched when read."""
        results = _Results(self, running)
        return LazyLogs(self.log_names, results.fetch, results.begin)


class _Results:
    """The values of running logs, computed once; small, because each execution has its own."""

    __slots__ = ("_begun", "_phase", "_running")

    def __init__(self, phase: RunningPhase, running: RunningLogs):
        self._phase = phase
        self._running = running
        self._begun: dict[str, jax.Array] | None = None

    def begin(self) -> dict[str, jax.Array]:
        if self._begun is None:
            begun = self._phase.compiled.begin_results(self._running)
            self._begun = {self._phase.prefix + name: value for name, value in begun.items()}
        return self._begun

    def fetch(self) -> dict[str, Any]:
        with self._phase.timing.device:
            return on_host(self.begin())


def start_phase(
    core: ModelCore, kind: Phase, reader: Reader, passes: int, data_on_device: bool = False, name: str = ""
) -> RunningPhase:
    """Returns a phase, ready to run, after checking the first batch and tracing the step on it.

    Args:
      passes, data_on_device: as in `RunningPhase`.

    Raises:
      ClusterError: if a process has no first batch, in all others.
    """
    timing = core.current_run.timing
    shares = core.strategy.spans_processes and reader.arrays is None
    try:
        with timing.data:
            batch = reader.peek()
    except Exception:
        if shares:  # the others would wait in the first step, and see no fault
            with contextlib.suppress(ClusterError, TimeoutError):
                core.assert_consistent("data", lambda: {"first batch": "none"})
        raise
    if shares:
        core.assert_consistent("data", lambda: {"first batch": "there"})
    with timing.compile:
        compiled = core.prepared_phase(kind, batch)
    reader.group_size = compiled.steps_per_execution  # so many batches are one execution
    phase = RunningPhase(core, kind, compiled, reader, passes, data_on_device,
                         compiled.new_guard(reader.num_shapes), timing, f"{name}_" if name else "")
    phase.place_arrays()
    return phase


def _batches_at_once(steps_per_execution: int, rows: int) -> int:
    """Returns the number of batches whose row indices are placed at once: placing takes as long as many small steps."""
    batches = min(_NUMBERS_AT_ONCE // max(rows, 1), _BATCHES_AT_ONCE)
    executions = batches // steps_per_execution
    return max(executions, 1) * steps_per_execution


def _has_good_values(core: ModelCore, kind: Phase, reader: Reader) -> bool:
    try:
        core.check_values(kind, reader.arrays.tree if reader.arrays is not None else None)
    except ValueError:
        return False  # maybe in rows that are never read, so each batch is checked
    return True
