"""The only host loop: fit, evaluate and predict are phases of it.

It never waits for a step: logs stay on the device until somebody reads them, batches are placed ahead by a thread,
and at most `MAX_IN_FLIGHT` executions are queued, which bounds the memory of their batches and outputs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Container, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from trainer.callbacks import CallbackList
from trainer.callbacks.lazy_logs import LazyLogs
from trainer.data import Demand, Group, Reader, prefetch
from trainer.data.batches import GroupBuffer
from trainer.distribute import Strategy
from trainer.distribute.placement import PlacedGroup
from trainer.interrupts import Interrupts
from trainer.phase import CompiledPhase
from trainer.timing import Timing

MAX_IN_FLIGHT = 2

Running = Any  # the running logs of a phase, as it packs them


class Trainee(Protocol):
    """What the loop needs of a model."""

    strategy: Strategy
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool
    timing: Timing

    @property
    def current_state(self) -> Any:
        """The state, for reading: its buffers are not to be donated."""

    def take_state(self) -> Any:
        """Returns the state, in buffers that may be donated."""

    def keep_state(self, state: Any) -> None:
        """Stores the state after an execution."""

    def prepared_phase(self, kind: str, batch: Any) -> CompiledPhase:
        """Returns the compiled step of a phase, after checking the first batch and tracing the step on it."""

    def place_arrays(self, reader: Reader, passes: int, requested: bool = False) -> Any | None:
        """Returns the reader's arrays on the devices, if batches are to be gathered there."""

    def check_labels(self, batch: Any) -> None:
        """Raises ValueError for labels that the loss cannot take. Leaves may have batches as a first axis."""


def fit(
    model: Trainee,
    reader: Reader,
    callbacks: CallbackList,
    epochs: int,
    initial_epoch: int = 0,
    validation: Reader | None = None,
    validation_freq: Any = 1,
) -> None:
    """Trains for `epochs - initial_epoch` epochs.

    Args:
      model: the model; its state is replaced after each execution.
      reader: the training batches.
      callbacks: called as in Keras; whatever is recorded of the run, they record.
      epochs: the number after that of the last epoch.
      initial_epoch: the number of the first epoch.
      validation: batches to evaluate at the end of an epoch.
      validation_freq: evaluate every so many epochs, or in the epochs listed (counted from 1).
    """
    validations = sum(_is_due(epoch, validation_freq) for epoch in range(initial_epoch, epochs))
    if validation is not None and validation.is_single_pass and validations > 1:
        raise ValueError(f"`validation_data` is a generator, which yields its batches once, but {validations} "
                         "validations are due. Pass data that can be iterated anew, or `validation_steps`: each "
                         "validation then takes the next batches.")
    model.stop_training = False
    with _timed(model) as timing:
        # All epochs count, not those that are left: a resumed run decides alike.
        train = _begin(model, "train", reader, passes=epochs, data_on_device=True)
        test = None if validation is None else _begin(model, "test", validation, passes=validations)
        validation_names = test.phase.log_names if test else ()
        callbacks.check_monitors([*train.phase.log_names, *(f"val_{name}" for name in validation_names)])
        logs: Any = {}
        with timing.measure("callbacks"):
            callbacks.on_train_begin()
        for epoch in range(initial_epoch, epochs):
            if reader.ran_out():
                break
            with timing.measure("callbacks"):
                callbacks.on_epoch_begin(epoch)
            logs = _lazy_logs(train, _run_epoch(model, train, callbacks, epoch))
            if test is not None and _is_due(epoch, validation_freq):
                test.reader.peek()  # a generator may have nothing left
                for name, value in _evaluate(model, test, callbacks).items():
                    logs[f"val_{name}"] = value
            with timing.measure("callbacks"):
                callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        with timing.measure("callbacks"):
            callbacks.on_train_end(logs)


def evaluate(model: Trainee, reader: Reader, callbacks: CallbackList) -> dict[str, Any]:
    """Returns the logs over the first epoch of `reader`; a one-shot source has its next batches in its place."""
    with _timed(model):
        return _evaluate(model, _begin(model, "test", reader, passes=1), callbacks)


def _evaluate(model: Trainee, feed: _Feed, callbacks: CallbackList) -> dict[str, Any]:
    model.stop_evaluating = False
    with feed.timing.measure("callbacks"):
        callbacks.on_test_begin()
    logs = _lazy_logs(feed, _run_epoch(model, feed, callbacks, epoch=0))
    with feed.timing.measure("callbacks"):
        callbacks.on_test_end(logs)
        return dict(logs)


def predict(model: Trainee, reader: Reader, callbacks: CallbackList) -> Iterator[Any]:
    """Yields the outputs for each batch as host arrays, in input order and without padding.

    At most `MAX_IN_FLIGHT` executions are ahead of the outputs that were yielded.
    """
    model.stop_predicting = False
    with _timed(model):
        feed = _begin(model, "predict", reader, passes=1)
        callbacks.on_predict_begin()
        ahead: collections.deque[tuple[PlacedGroup, Any, int]] = collections.deque()
        per_batch = callbacks.wants_batch_hooks("predict")
        with _placed(model, feed, epoch=0) as groups:
            for group in groups:
                state, count = model.current_state, group.count
                outputs = feed.phase.executable(state, group=group)(state)
                # Outputs are stacked, so batches are not run one by one even if a callback wants to see each.
                if per_batch:
                    count = _call_for_each_batch(model, callbacks, group, outputs)
                ahead.append((group, outputs, count))
                callbacks.on_execution_end("predict", group.first + count - 1, _output_logs(group, outputs, count - 1))
                if len(ahead) > MAX_IN_FLIGHT:
                    yield from _on_host(*ahead.popleft())
                if model.stop_predicting:
                    break
        while ahead:
            yield from _on_host(*ahead.popleft())
        callbacks.on_predict_end()


def _call_for_each_batch(model: Trainee, callbacks: CallbackList, group: PlacedGroup, outputs: Any) -> int:
    """Calls the hooks of prediction for the batches of a group; returns how many before `stop_predicting`."""
    for index in range(group.count):
        callbacks.on_predict_batch_begin(group.first + index, {})
        callbacks.on_predict_batch_end(group.first + index, _output_logs(group, outputs, index))
        if model.stop_predicting:
            return index + 1
    return group.count


def run_on_batch(model: Trainee, kind: str, reader: Reader) -> dict[str, Any]:
    """Runs the one batch of `reader` outside of any epoch; returns its logs, fetched."""
    with _timed(model):
        feed = _begin(model, kind, reader, passes=1)
        group = model.strategy.place_group(next(reader.read(0)))
        with feed.interrupts:
            running = _execute(model, feed, group, 0, 1, feed.phase.empty_logs)
        return feed.phase.fetch_results(running)


def compile_ahead(model: Trainee, kind: str, reader: Reader, passes: int) -> None:
    """Compiles a phase for the batches of `reader` as a run of `passes` epochs would, running nothing.

    That is for full batches and, of data whose length is known, for a shorter last one.
    """
    with _timed(model):
        feed = _begin(model, kind, reader, passes, data_on_device=kind == "train")
        running = () if kind == "predict" else (feed.phase.empty_logs,)
        count = reader.num_batches
        if reader.arrays is None or count is None or count == 1:
            # A stream is expected to fill its groups, and so is what the one batch is a sample of.
            buffer = GroupBuffer(reader.group_size)
            buffer.add(reader.peek(), 0)
            groups = [buffer.take()]
        else:
            groups = [next(reader.read(0, start, feed.arrays is not None)) for start in (0, count - 1)]
        for group in groups:
            placed = model.strategy.place_group(group, feed.arrays)
            feed.phase.executable(model.current_state, *running, group=placed)
        if running:
            feed.phase.fetch_results(feed.phase.empty_logs)


@contextlib.contextmanager
def _timed(model: Trainee) -> Iterator[Timing]:
    """Gives the model a clock of its own for a run; one inside of another run gives the clock back at its end."""
    outer, timing = model.timing, Timing()
    model.timing = timing
    try:
        yield timing
    finally:
        timing.end()
        if outer.is_running:
            model.timing = outer


@dataclasses.dataclass(frozen=True)
class _Feed:
    """What a phase runs on.

    Attributes:
      kind: "train", "test" or "predict".
      phase: the compiled step.
      reader: yields the batches.
      arrays: the reader's arrays on the devices, where batches are gathered from them.
      timing: the clock of the run.
      interrupts: holds off Ctrl-C.
    """

    kind: str
    phase: CompiledPhase
    reader: Reader
    arrays: Any | None
    timing: Timing
    interrupts: Interrupts = dataclasses.field(default_factory=Interrupts)


def _begin(model: Trainee, kind: str, reader: Reader, passes: int, data_on_device: bool = False) -> _Feed:
    timing = model.timing
    with timing.measure("data"):
        batch = reader.peek()
    with timing.measure("compile"):
        phase = model.prepared_phase(kind, batch)
    phase.begin_run()
    phase.timing = timing
    reader.group_size = phase.steps_per_execution
    with timing.measure("data"):
        arrays = model.place_arrays(reader, passes, data_on_device)
        if arrays is not None and reader.arrays is not None and kind != "predict":
            model.check_labels(reader.arrays.tree)
    return _Feed(kind, phase, reader, arrays, timing)


def _run_epoch(model: Trainee, feed: _Feed, callbacks: CallbackList, epoch: int) -> Running:
    kind, timing = feed.kind, feed.timing
    feed.phase.timing = timing  # a callback may have run the phase, with another clock, in the meantime
    running = feed.phase.empty_logs
    in_flight: collections.deque[Any] = collections.deque()
    per_batch = callbacks.wants_batch_hooks(kind)
    with feed.interrupts, _placed(model, feed, epoch) as groups:
        for group, start, stop in _executions(feed, groups, callbacks, per_batch):
            first, last = group.first + start, group.first + stop - 1
            if per_batch:
                with timing.measure("callbacks"):
                    getattr(callbacks, f"on_{kind}_batch_begin")(first, {})
            running = _execute(model, feed, group, start, stop, running)
            in_flight.extend(jax.tree.leaves(running)[:1])
            if len(in_flight) > MAX_IN_FLIGHT:
                with timing.measure("device"):
                    in_flight.popleft().block_until_ready()
            with timing.measure("callbacks"):
                logs = _lazy_logs(feed, running)
                if per_batch:
                    getattr(callbacks, f"on_{kind}_batch_end")(last, logs)
                callbacks.on_execution_end(kind, last, logs)
            if model.stop_training if kind == "train" else model.stop_evaluating:
                break
    return running


def _executions(
    feed: _Feed, groups: Iterator[PlacedGroup], callbacks: CallbackList, per_batch: bool
) -> Iterator[tuple[PlacedGroup, int, int]]:
    """Yields `(group, start, stop)`: which batches of which group to execute at once.

    That is a whole group, unless a callback wants to see each batch or looks at one in the middle.
    """
    looks = callbacks.wants("next_look")
    while True:
        with feed.timing.measure("data"):
            group = next(groups, None)
        if group is None:
            return
        start = 0
        while start < group.count:
            stop = start + 1 if per_batch else group.count
            look = callbacks.next_look(feed.kind, group.first + start) if looks else None
            if look is not None:
                stop = min(stop, look - group.first + 1)
            yield group, start, stop
            start = stop


def _execute(model: Trainee, feed: _Feed, group: PlacedGroup, start: int, stop: int, running: Running) -> Running:
    executable = feed.phase.executable(model.current_state, running, group=group, start=start, stop=stop)
    if feed.kind == "test":
        return executable(model.current_state, running)
    # Between a step, which donates the old state, and the storing of the new one, Ctrl-C would leave the model without.
    with feed.interrupts.deferred:
        state, running = executable(model.take_state(), running)
        model.keep_state(state)
    feed.timing.rows += group.rows * (stop - start)
    return running


@contextlib.contextmanager
def _placed(model: Trainee, feed: _Feed, epoch: int) -> Iterator[Iterator[PlacedGroup]]:
    """Gives one epoch's groups on the devices; where whole batches are sent there, a thread is ahead of the block."""
    if feed.arrays is not None:
        # Row numbers are placed in no time: a thread would only compete for the interpreter.
        with contextlib.closing(feed.reader.read(epoch, row_numbers=True)) as groups:
            yield (model.strategy.place_group(group, feed.arrays) for group in groups)
        return

    def place(group: Group) -> PlacedGroup:
        if feed.kind != "predict":
            model.check_labels(jax.tree.map(lambda leaf: leaf[:group.count], group.data))
        return model.strategy.place_group(group)

    demand = Demand()
    with prefetch(feed.reader.read(epoch, is_urgent=demand.is_urgent), place, demand=demand) as placed:
        yield placed


def _lazy_logs(feed: _Feed, running: Running) -> LazyLogs:
    return LazyLogs(feed.phase.log_names, functools.partial(feed.phase.fetch_results, running))


def _output_logs(group: PlacedGroup, outputs: Any, index: int) -> LazyLogs:
    return LazyLogs(("outputs",), lambda: {"outputs": list(_on_host(group, outputs, index + 1))[index]})


def _on_host(group: PlacedGroup, outputs: Any, count: int) -> Iterator[Any]:
    outputs = jax.device_get(outputs)
    for index in range(count):
        yield jax.tree.map(lambda leaf, at=index: leaf[at, : group.rows], outputs)


def _is_due(epoch: int, validation_freq: Any) -> bool:
    if isinstance(validation_freq, Container):
        return epoch + 1 in validation_freq
    return (epoch + 1) % validation_freq == 0


def collect(batches: Iterator[Any], rows: int | float | None) -> Any:
    """Returns the outputs of all batches as one tree of arrays.

    Args:
      batches: trees of host arrays, rows first.
      rows: how many rows there will be, if known: the result is then allocated once and filled.
    """
    if rows is None or math.isinf(rows):
        parts = list(batches)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    filled, start = None, 0
    for batch in batches:
        if filled is None:
            filled = jax.tree.map(lambda leaf: np.empty((int(rows), *leaf.shape[1:]), leaf.dtype), batch)
        stop = start + jax.tree.leaves(batch)[0].shape[0]
        jax.tree.map(lambda whole, part, at=slice(start, stop): whole.__setitem__(at, part), filled, batch)
        start = stop
    return jax.tree.map(lambda leaf: leaf[:start], filled)
