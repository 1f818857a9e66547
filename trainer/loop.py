"""The only host loop: fit, evaluate and predict are phases of it.

It never waits for a step: logs stay on the device until somebody reads them, batches are placed ahead by a thread,
and at most `MAX_IN_FLIGHT` executions are queued, which bounds the memory of their batches and outputs.
"""

from __future__ import annotations

import collections
import contextlib
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
from trainer.phase import CompiledPhase, fetch_results

MAX_IN_FLIGHT = 2

Running = dict[str, RunningLog]


class Trainee(Protocol):
    """What the loop needs of a model."""

    strategy: Strategy
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool

    @property
    def current_state(self) -> Any:
        """The state, for reading: its buffers are not to be donated."""

    def take_state(self) -> Any:
        """Returns the state, in buffers that may be donated."""

    def keep_state(self, state: Any) -> None:
        """Stores the state after an execution."""

    def prepared_phase(self, kind: str, batch: Any) -> CompiledPhase:
        """Returns the compiled step of a phase, after checking the first batch and tracing the step on it."""

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
    if validation is not None and validation.is_single_pass:
        _check_single_validation(epochs, initial_epoch, validation_freq)
    model.stop_training = False
    train = model.prepared_phase("train", reader.peek())
    names = list(train.log_names)
    if validation is not None:
        names += [f"val_{name}" for name in model.prepared_phase("test", validation.peek()).log_names]
    callbacks.check_monitors(names)
    logs: Any = {}
    callbacks.on_train_begin()
    for epoch in range(initial_epoch, epochs):
        if reader.ran_out():
            break
        callbacks.on_epoch_begin(epoch)
        running = _run_epoch(model, "train", train, reader, callbacks, epoch)
        logs = _lazy_logs(train, running)
        if validation is not None and _is_due(epoch, validation_freq):
            for name, value in evaluate(model, validation, callbacks).items():
                logs[f"val_{name}"] = value
        callbacks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    callbacks.on_train_end(logs)


def evaluate(model: Trainee, reader: Reader, callbacks: CallbackList) -> dict[str, Any]:
    """Returns the logs over the first epoch of `reader`; a one-shot source has its next batches in its place."""
    model.stop_evaluating = False
    phase = model.prepared_phase("test", reader.peek())
    callbacks.on_test_begin()
    logs = _lazy_logs(phase, _run_epoch(model, "test", phase, reader, callbacks, epoch=0))
    callbacks.on_test_end(logs)
    return dict(logs)


def predict(model: Trainee, reader: Reader, callbacks: CallbackList) -> Iterator[Any]:
    """Yields the outputs for each batch as host arrays, in input order and without padding.

    At most `MAX_IN_FLIGHT` executions are ahead of the outputs that were yielded.
    """
    model.stop_predicting = False
    phase = model.prepared_phase("predict", reader.peek())
    callbacks.on_predict_begin()
    ahead: collections.deque[tuple[PlacedGroup, Any]] = collections.deque()
    per_batch = callbacks.wants_batch_hooks("predict")
    with _placed(model, "predict", phase, reader, per_batch, epoch=0) as groups:
        for group in groups:
            if per_batch:
                callbacks.on_predict_batch_begin(group.first, {})
            outputs = phase(model.current_state, group=group)
            ahead.append((group, outputs))
            _after_execution("predict", callbacks, per_batch, group, _output_logs(group, outputs))
            if len(ahead) > MAX_IN_FLIGHT:
                yield from _on_host(*ahead.popleft())
            if model.stop_predicting:
                break
    while ahead:
        yield from _on_host(*ahead.popleft())
    callbacks.on_predict_end()


def run_on_batch(model: Trainee, kind: str, batch: Any, group: Group) -> Running:
    """Runs one batch outside of any epoch; returns its logs."""
    phase = model.prepared_phase(kind, batch)
    placed = model.strategy.place_group(group, phase.stack_size(group.rows, group.count, capacity=1))
    return _execute(model, kind, phase, placed, phase.empty_logs)


def _run_epoch(
    model: Trainee, kind: str, phase: CompiledPhase, reader: Reader, callbacks: CallbackList, epoch: int
) -> Running:
    running = phase.empty_logs
    in_flight: collections.deque[Any] = collections.deque()
    per_batch = callbacks.wants_batch_hooks(kind)
    with _placed(model, kind, phase, reader, per_batch, epoch) as groups:
        for group in groups:
            if per_batch:
                getattr(callbacks, f"on_{kind}_batch_begin")(group.first, {})
            running = _execute(model, kind, phase, group, running)
            in_flight.extend(jax.tree.leaves(running)[:1])
            if len(in_flight) > MAX_IN_FLIGHT:
                in_flight.popleft().block_until_ready()
            _after_execution(kind, callbacks, per_batch, group, _lazy_logs(phase, running))
            if model.stop_training if kind == "train" else model.stop_evaluating:
                break
    return running


def _execute(model: Trainee, kind: str, phase: CompiledPhase, group: PlacedGroup, running: Running) -> Running:
    if kind == "test":
        return phase(model.current_state, running, group=group)
    with _interrupts_deferred():
        state, running = phase(model.take_state(), running, group=group)
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
    model: Trainee, kind: str, phase: CompiledPhase, reader: Reader, per_batch: bool, epoch: int
) -> contextlib.AbstractContextManager[Iterator[PlacedGroup]]:
    """Returns one epoch's groups, placed ahead by a thread that ends with the `with` block."""
    # A callback that wants to see each batch gets executions of one step; the others cost nothing.
    reader.group_size = 1 if per_batch else phase.steps_per_execution

    def place(group: Group) -> PlacedGroup:
        if kind != "predict":
            model.check_labels(group.data)
        stack_size = phase.stack_size(group.rows, group.count, reader.group_size)
        return model.strategy.place_group(group, stack_size)

    return prefetch(reader.read(epoch), place)


def _after_execution(kind: str, callbacks: CallbackList, per_batch: bool, group: PlacedGroup, logs: LazyLogs) -> None:
    last = group.first + group.count - 1
    if per_batch:
        getattr(callbacks, f"on_{kind}_batch_end")(last, logs)
    callbacks.on_execution_end(kind, last, logs)


def _lazy_logs(phase: CompiledPhase, running: Running) -> LazyLogs:
    return LazyLogs(phase.log_names, lambda: fetch_results(running))


def _output_logs(group: PlacedGroup, outputs: Any) -> LazyLogs:
    return LazyLogs(("outputs",), lambda: {"outputs": list(_on_host(group, outputs))[-1]})


def _on_host(group: PlacedGroup, outputs: Any) -> Iterator[Any]:
    outputs = jax.device_get(outputs)
    for index in range(group.count):
        yield jax.tree.map(lambda leaf, at=index: leaf[at, : group.rows], outputs)


def _check_single_validation(epochs: int, initial_epoch: int, validation_freq: Any) -> None:
    count = sum(_is_due(epoch, validation_freq) for epoch in range(initial_epoch, epochs))
    if count > 1:
        raise ValueError(f"`validation_data` is a generator, which yields its batches once, but {count} validations "
                         "are due. Pass data that can be iterated anew, or `validation_steps`: each validation then "
                         "takes the next batches.")


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
