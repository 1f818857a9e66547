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
import signal
import threading
from collections.abc import Container, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from trainer.callbacks import CallbackList
from trainer.callbacks.lazy_logs import LazyLogs
from trainer.data import Group, Reader, prefetch
from trainer.distribute import Strategy
from trainer.distribute.placement import PlacedGroup
from trainer.logs import RunningLog
from trainer.phase import CompiledPhase
from trainer.timing import Timing

MAX_IN_FLIGHT = 2

Running = dict[str, RunningLog]


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
    timing = model.timing = Timing()
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
    timing.end()


def evaluate(model: Trainee, reader: Reader, callbacks: CallbackList) -> dict[str, Any]:
    """Returns the logs over the first epoch of `reader`; a one-shot source has its next batches in its place."""
    model.timing = Timing()
    return _evaluate(model, _begin(model, "test", reader, passes=1), callbacks)


def _evaluate(model: Trainee, feed: _Feed, callbacks: CallbackList) -> dict[str, Any]:
    model.stop_evaluating = False
    with model.timing.measure("callbacks"):
        callbacks.on_test_begin()
    logs = _lazy_logs(feed, _run_epoch(model, feed, callbacks, epoch=0))
    with model.timing.measure("callbacks"):
        callbacks.on_test_end(logs)
        return dict(logs)


def predict(model: Trainee, reader: Reader, callbacks: CallbackList) -> Iterator[Any]:
    """Yields the outputs for each batch as host arrays, in input order and without padding.

    At most `MAX_IN_FLIGHT` executions are ahead of the outputs that were yielded.
    """
    model.stop_predicting = False
    model.timing = Timing()
    feed = _begin(model, "predict", reader, passes=1)
    callbacks.on_predict_begin()
    ahead: collections.deque[tuple[PlacedGroup, Any]] = collections.deque()
    per_batch = callbacks.wants_batch_hooks("predict")
    with _placed(model, feed, callbacks, per_batch, epoch=0) as groups:
        for group in groups:
            if per_batch:
                callbacks.on_predict_batch_begin(group.first, {})
            outputs = feed.phase(model.current_state, group=group)
            ahead.append((group, outputs))
            _after_execution("predict", callbacks, per_batch, group, _output_logs(group, outputs))
            if len(ahead) > MAX_IN_FLIGHT:
                yield from _on_host(*ahead.popleft())
            if model.stop_predicting:
                break
    while ahead:
        yield from _on_host(*ahead.popleft())
    callbacks.on_predict_end()


def run_on_batch(model: Trainee, kind: str, batch: Any, group: Group) -> dict[str, Any]:
    """Runs one batch outside of any epoch; returns its logs, fetched."""
    model.timing = Timing()
    phase = model.prepared_phase(kind, batch)
    phase.begin_run(model.timing)
    placed = model.strategy.place_group(group, phase.stack_size(group.rows, group.count, capacity=1))
    return phase.fetch_results(_execute(model, kind, phase, placed, phase.empty_logs))


def compile_ahead(model: Trainee, kind: str, reader: Reader, passes: int) -> None:
    """Compiles a phase for the batches of `reader` as a run of `passes` epochs would, running nothing.

    That is for full batches and, of data whose length is known, for a shorter last one.
    """
    model.timing = Timing()
    feed = _begin(model, kind, reader, passes, data_on_device=kind == "train")
    phase, is_resident = feed.phase, feed.arrays is not None
    running = () if kind == "predict" else (phase.empty_logs,)
    reader.group_size = phase.steps_per_execution
    count = reader.num_batches
    if reader.arrays is None or count is None:
        stack = jax.tree.map(lambda leaf: leaf[None], reader.peek())
        groups = [Group(stack, 1, jax.tree.leaves(stack)[0].shape[1], 0)]
    else:
        groups = [next(reader.read(0, start, is_resident)) for start in sorted({0, count - 1})]
    for group in groups:
        # A stream is expected to fill its groups.
        size = group.count if reader.arrays is not None else phase.steps_per_execution
        stack_size = phase.stack_size(group.rows, size, reader.group_size, is_resident)
        placed = model.strategy.place_group(group, stack_size, feed.arrays)
        phase.executable(model.current_state, *running, group=placed)
    if running:
        phase.fetch_results(phase.empty_logs)
    model.timing.end()


@dataclasses.dataclass(frozen=True)
class _Feed:
    """What a phase runs on.

    Attributes:
      kind: "train", "test" or "predict".
      phase: the compiled step.
      reader: yields the batches.
      arrays: the reader's arrays on the devices, where batches are gathered from them.
      timing: the clock of the run.
    """

    kind: str
    phase: CompiledPhase
    reader: Reader
    arrays: Any | None
    timing: Timing


def _begin(model: Trainee, kind: str, reader: Reader, passes: int, data_on_device: bool = False) -> _Feed:
    timing = model.timing
    with timing.measure("data"):
        batch = reader.peek()
    with timing.measure("compile"):
        phase = model.prepared_phase(kind, batch)
    phase.begin_run(timing)
    with timing.measure("data"):
        arrays = model.place_arrays(reader, passes, data_on_device)
        if arrays is not None and kind != "predict":
            model.check_labels(reader.arrays.tree)
    return _Feed(kind, phase, reader, arrays, timing)


def _run_epoch(model: Trainee, feed: _Feed, callbacks: CallbackList, epoch: int) -> Running:
    kind, phase, timing = feed.kind, feed.phase, feed.timing
    running = phase.empty_logs
    in_flight: collections.deque[Any] = collections.deque()
    per_batch = callbacks.wants_batch_hooks(kind)
    with _placed(model, feed, callbacks, per_batch, epoch) as groups:
        while True:
            with timing.measure("data"):
                group = next(groups, None)
            if group is None:
                break
            if per_batch:
                with timing.measure("callbacks"):
                    getattr(callbacks, f"on_{kind}_batch_begin")(group.first, {})
            running = _execute(model, kind, phase, group, running)
            if kind == "train":
                timing.rows += group.rows * group.count
            in_flight.extend(jax.tree.leaves(running)[:1])
            if len(in_flight) > MAX_IN_FLIGHT:
                with timing.measure("device"):
                    in_flight.popleft().block_until_ready()
            with timing.measure("callbacks"):
                _after_execution(kind, callbacks, per_batch, group, _lazy_logs(feed, running))
            if model.stop_training if kind == "train" else model.stop_evaluating:
                break
    return running


def _execute(model: Trainee, kind: str, phase: CompiledPhase, group: PlacedGroup, running: Running) -> Running:
    if kind == "test":
        return phase(model.current_state, running, group=group)
    executable = phase.executable(model.current_state, running, group=group)
    with _interrupts_deferred():
        state, running = executable(model.take_state(), running)
        model.keep_state(state)
    return running


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Lets Ctrl-C take effect only after the block.

    Between a step, which donates the old state, and the storing of the new one, it would leave the model without any.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Python calls handlers in the main thread only, and only there may they be set.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


def _placed(
    model: Trainee, feed: _Feed, callbacks: CallbackList, per_batch: bool, epoch: int
) -> contextlib.AbstractContextManager[Iterator[PlacedGroup]]:
    """Returns one epoch's groups, placed ahead by a thread that ends with the `with` block."""
    reader, phase, arrays = feed.reader, feed.phase, feed.arrays
    # A callback that wants to see each batch gets executions of one step; the others cost nothing.
    reader.group_size = 1 if per_batch else phase.steps_per_execution
    reader.next_cut = functools.partial(callbacks.next_look, feed.kind) if callbacks.wants("next_look") else None
    is_resident = arrays is not None

    def place(group: Group) -> PlacedGroup:
        # Those of arrays on the devices were checked all at once.
        if feed.kind != "predict" and not is_resident:
            model.check_labels(group.data)
        stack_size = phase.stack_size(group.rows, group.count, reader.group_size, is_resident)
        return model.strategy.place_group(group, stack_size, arrays)

    return prefetch(reader.read(epoch, row_numbers=is_resident), place)


def _after_execution(kind: str, callbacks: CallbackList, per_batch: bool, group: PlacedGroup, logs: LazyLogs) -> None:
    last = group.first + group.count - 1
    if per_batch:
        getattr(callbacks, f"on_{kind}_batch_end")(last, logs)
    callbacks.on_execution_end(kind, last, logs)


def _lazy_logs(feed: _Feed, running: Running) -> LazyLogs:
    return LazyLogs(feed.phase.log_names, functools.partial(feed.phase.fetch_results, running))


def _output_logs(group: PlacedGroup, outputs: Any) -> LazyLogs:
    return LazyLogs(("outputs",), lambda: {"outputs": list(_on_host(group, outputs))[-1]})


def _on_host(group: PlacedGroup, outputs: Any) -> Iterator[Any]:
    outputs = jax.device_get(outputs)
    for index in range(group.count):
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
