"""The train phase of a model whose steps run on workers: the loop's view of asynchronous training.

An execution sends its batches to the workers, waits until all are applied, and fetches the state. So everything that
the loop does between executions, such as checkpoints and callbacks, sees the state after a definite number of updates;
only the inside of an execution is asynchronous.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from trainer.core.compile.jit import compiled
from trainer.core.compile.recompilation_guard import CompileGuard
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState, shapes_of
from trainer.core.types import PyTree
from trainer.data.sources.groups import BatchSpec, Group
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator, RemoteValue
from trainer.distribute.parameter_server.served_model import ServedModel
from trainer.distribute.parameter_server.shared import SharedValue
from trainer.distribute.parameter_server.strategy import ParameterServerStrategy
from trainer.distribute.placement.placement import PlacedGroup
from trainer.engine.step import running_logs, steps
from trainer.engine.step.compiled_phase import CompiledPhase
from trainer.engine.step.on_workers.remote_step import RemoteStep, train_on_batch
from trainer.engine.step.running_logs import RunningLogs

STEPS_PER_WORKER = 32  # per execution, at whose end workers wait for the last
SENT_BYTES = 2**28  # of the batches that an execution sends


class SharedRows:
    """A group of batches as row indices of arrays on the workers.

    Attributes:
      arrays: the arrays to send; or a `PerWorkerIterator`, from which each worker reads its next batch, regardless of
        the indices.
      numbers: int32 of shape `(batches, rows)`.
    """

    def __init__(self, arrays: SharedValue, numbers: np.ndarray):
        self.arrays, self.numbers = arrays, numbers


class RemotePhase(CompiledPhase):
    """A model's train step on the workers of a `ParameterServerStrategy`.

    Args:
      user_step: the model's `train_step`.
      shared_step: its replacement for workers.
      steps_per_execution: as in `CompiledPhase`; "auto" is `STEPS_PER_WORKER` for each worker.
      served: the model's state on the servers.
      check_labels: raises for targets that the loss or a metric cannot take.
    """

    is_asynchronous = True

    def __init__(self, user_step: steps.Step, shared_step: Any, strategy: ParameterServerStrategy,
                 steps_per_execution: int | str, served: ServedModel, check_labels: Callable[[Any, Any], None]):
        super().__init__("train", user_step, strategy, steps_per_execution, eager=False)
        self._user_step, self._shared_step, self._cluster, self._served = user_step, shared_step, strategy, served
        self._check_labels = check_labels
        self._last: TrainState | None = None  # the state on the servers
        self._step: SharedValue | None = None  # a `RemoteStep`
        self._client: SharedValue | None = None
        self._next_number = 0
        self._logs: Any = None  # the structure of a step's logs
        self._add: Any = None
        self._has_warned = False

    def trace(self, state: TrainState, batch: PyTree) -> None:
        if self._logs is None:
            self._spec = BatchSpec.of(batch)
            self._logs = self._remote_step(self._user_step, shapes_of(state)).shapes_of_logs(batch)
        super().trace(state, batch)

    def _remote_step(self, step: Any, shapes: TrainState) -> RemoteStep:
        tables = self._served.partition_of(shapes.params).tables
        return RemoteStep(step, shapes, tables, self._spec, self._check_labels)

    def _learn_logs(self, shapes: PyTree) -> None:
        super()._learn_logs({**self._logs, "staleness": jax.ShapeDtypeStruct((), np.float32)})
        self._add = compiled(running_logs.add_step)

    def _steps_to_fuse(self, cost: Any, stacked: PyTree) -> int:
        size = max(sum(leaf.nbytes for leaf in jax.tree.leaves(stacked)), 1)
        return max(min(STEPS_PER_WORKER * self._cluster.num_workers, SENT_BYTES // size), self._cluster.num_workers)

    def place_group(self, group: Group, arrays: Any = None) -> PlacedGroup:
        """Returns a group of batches, which stay on the host until they are sent."""
        data = SharedRows(arrays, group.data) if isinstance(arrays, SharedValue) else group.data
        return PlacedGroup(data, group.count, group.rows, group.first, group.resume_token)

    def executable(
        self, *running: Any, group: PlacedGroup, guard: CompileGuard, timing: Timing, start: int = 0,
        stop: int | None = None,
    ) -> Callable[..., Any]:
        stop = group.count if stop is None else stop

        def execute(state: TrainState, running: Any) -> tuple[TrainState, Any]:
            with timing.device:
                return self._trained(state, running, group, range(start, stop))

        return execute

    def compiled_text(self) -> str | None:
        return None  # the programs are on the workers

    def _trained(self, state: TrainState, running: RunningLogs, group: PlacedGroup,
                 batches: range) -> tuple[TrainState, Any]:
        coordinator = self._cluster.coordinator
        coordinator.require_open()
        coordinator.join()
        if state is not self._last:  # first call, or changed, for example the learning rate
            self._last = None
            self._served.load(state)
            shapes = shapes_of(state)
            self._step = self._step or self._cluster.shared(self._remote_step(self._shared_step, shapes))
            self._client = self._cluster.shared(self._served.client(shapes))
            self._next_number = 0
        self._last = None  # if a step fails, the state on the servers is unknown
        try:
            outcomes = self._make_steps(coordinator, _batches(group, batches))
        except BaseException:  # such as KeyboardInterrupt, which must not wait
            coordinator.cancel()
            raise
        state, updates = self._served.fetch(state, self._strategy.place_state, may_donate=True)
        if updates != self._next_number:
            raise RuntimeError(f"{self._next_number} steps were made, but the parameter servers have {updates} "
                               "updates. A scheduled function must not train a model that `fit` is training.")
        for leaves, rows, staleness in outcomes:
            logs = jax.tree.unflatten(jax.tree.structure(self._logs), leaves)
            running = self._add(running, {**logs, "staleness": np.float32(staleness)}, rows)
        self._last = state
        return state, running

    def _make_steps(self, coordinator: ClusterCoordinator, batches: Iterator[Any]) -> list[Any]:
        """Trains on batches in workers until all updates are made; returns the results of `train_on_batch`."""
        pending: collections.deque[RemoteValue] = collections.deque()
        outcomes: list[Any] = []
        most = self._cluster.max_staleness
        for batch in batches:
            while most is not None and len(pending) > most:
                outcomes.append(self._outcome(pending.popleft()))
            pending.append(coordinator.schedule(
                train_on_batch, args=(self._step, self._client, self._next_number, *batch)))
            self._next_number += 1
        outcomes += [self._outcome(value) for value in pending]
        coordinator.join()
        self._warn_of_staleness(sum(staleness for *_, staleness in outcomes) / len(outcomes))
        return outcomes

    def _outcome(self, value: RemoteValue) -> Any:
        try:
            return value.fetch()
        except Exception:
            self._cluster.coordinator.join()  # raises the first error once nothing runs any more
            raise

    def _warn_of_staleness(self, mean: float) -> None:
        if mean > 2 * self._cluster.num_workers and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"Gradients have missed {mean:.0f} updates on average, with {self._cluster.num_workers} "
                          "workers: some are much slower than others. Bound it by `max_staleness`, or divide such "
                          'gradients by `staleness="scale"`.', stacklevel=2)


def _batches(group: PlacedGroup, numbers: range) -> Iterator[tuple[Any, SharedValue | None]]:
    """Yields batches as arguments of `train_on_batch`."""
    if isinstance(group.data, SharedRows):
        for number in numbers:
            yield group.data.numbers[number], group.data.arrays
        return
    for number in numbers:
        yield jax.tree.map(lambda leaf, number=number: leaf[number], group.data), None
