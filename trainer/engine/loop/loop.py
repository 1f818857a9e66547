"""The only host loop, with the phases fit, evaluate and predict.

It does not wait for the step that it has just started: logs stay on the device until they are read, and batches are
placed ahead, in a thread if that saves time. Few executions are queued (see `MAX_IN_FLIGHT`), which bounds the memory
of their batches and outputs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from trainer.callbacks import CallbackList
from trainer.callbacks.base.lazy_logs import LazyLogs
from trainer.core.timing import Timing
from trainer.core.types import Phase, PyTree
from trainer.data.reader import Reader
from trainer.data.sources.groups import GroupBuffer, ResumeToken
from trainer.distribute.placement.placement import PlacedGroup
from trainer.engine.loop.resumable_run import RunLimits, TrainingRun
from trainer.engine.loop.running_phase import RunningPhase, start_phase
from trainer.engine.model.core.model_core import ModelCore
from trainer.engine.model.core.run_fingerprint import describe_data, describe_sets, describe_training
from trainer.engine.step.running_logs import RunningLogs

# Maximum number of unfinished executions when the next starts.
MAX_IN_FLIGHT = 2
MAX_WHOLE_GROUPS_IN_FLIGHT = 1  # each holds many batches, and takes much longer than a dispatch
MAX_SINGLE_STEPS_IN_FLIGHT = 8  # of a group; they are cheap, and need no more memory than the group

_NO_SETS: Mapping[str, Reader] = {}

AfterExecution = Callable[[int, RunningLogs, ResumeToken | None], None]  # given the number of batches of the epoch


def fit(
    core: ModelCore,
    reader: Reader,
    callbacks: CallbackList,
    epochs: int,
    initial_epoch: int = 0,
    validation: Mapping[str, Reader] = _NO_SETS,
    validation_freq: Any = 1,
    timing: Timing | None = None,
    limits: RunLimits | None = None,
) -> None:
    """Trains for `epochs - initial_epoch` epochs.

    Args:
      core: the model; its state is replaced after each execution.
      reader: the training batches.
      callbacks: called as in Keras; they keep all records of the run.
      epochs: total number of epochs, including epochs before `initial_epoch`.
      initial_epoch: the number of the first epoch.
      validation: sets of batches to evaluate in turn at the end of an epoch, by name; the name is the prefix of their
        logs. A single set may have the name "".
      validation_freq: number of epochs between evaluations, or a list of epochs to evaluate after (counted from 1).
      timing: the clock to use.
      limits: ends the run early.
    """
    limits = limits or RunLimits()
    validations = sum(_is_due(epoch, validation_freq) for epoch in range(initial_epoch, epochs)) if validation else 0
    if validations > 1:
        _check_can_be_read_again(validation, validations)
    core.set_stops("train", False)
    with core.current_run.timed(timing, "fit", trains=True) as timing:
        # Counts all epochs, not the remaining epochs, so that a resumed run decides the same.
        train = start_phase(core, "train", reader, passes=epochs, data_on_device=True)
        tests = []
        for name, each in validation.items():
            with _naming_validation_data(name):
                tests.append(start_phase(core, "test", each, passes=validations, name=name))
        validation_names = _distinct([f"val_{name}" for test in tests for name in test.log_names])
        core.assert_consistent("training", lambda: describe_training(
            reader, validation, callbacks, epochs=epochs, initial_epoch=initial_epoch,
            logs=", ".join(train.compiled.log_names), validation_freq=validation_freq, **limits.describe()))
        is_each_validated = validations >= epochs - initial_epoch
        in_batches = train.log_names
        in_each = [*in_batches, *(validation_names if is_each_validated else [])]
        in_some = [*in_batches, *(validation_names if is_each_validated or validations else [])]
        callbacks.check_monitors(in_some, in_each, in_batches)
        run = TrainingRun(
            core, reader, validation, callbacks, train.compiled.empty_logs, (initial_epoch, epochs), timing, limits)
        validator = functools.partial(_evaluate, tests, callbacks) if tests else None
        with run, core.current_run.validating(validator, list(validation)):
            with timing.callbacks:
                callbacks.on_train_begin()
            run.begin_or_resume()  # a resumed run may be at another epoch, in the middle of an epoch, or stopped
            logs: Any = run.logs
            last_logs: RunningLogs | None = None
            while run.epoch < epochs and not run.is_over:
                epoch = run.epoch
                if run.batch == 0:
                    is_exhausted = reader.check_exhausted()
                    _agree_on_batches(train, {"has run out of data": str(is_exhausted)})
                    if is_exhausted:
                        break
                    with timing.callbacks:
                        callbacks.on_epoch_begin(epoch)
                if not run.is_epoch_over:
                    if epoch + 1 < epochs:
                        reader.draw_ahead(epoch + 1)
                    _run_epoch(train, callbacks, epoch, run.batch, run.running_logs, after_execution=run.trained,
                               last_batch=run.last_batch, next_phase=next(iter(tests), None))
                    if epoch + 1 < epochs and not core.stops("train"):
                        train.look_ahead(epoch + 1)
                logs = train.lazy_logs(run.running_logs)
                run.epoch_trained()
                if tests and _is_due(epoch, validation_freq):
                    for name, value in _evaluate(tests, callbacks, run.validated).items():
                        logs[f"val_{name}"] = value
                with timing.callbacks:
                    callbacks.on_epoch_end(epoch, logs)
                _stops(core, "train", core.strategy.spans_processes)
                last_logs = run.running_logs
                run.epoch_ended(logs)
            if not tests and last_logs is not None:
                _store_metrics(train, last_logs, logs)
            with timing.callbacks:
                callbacks.on_train_end(logs)


def _run_epoch(
    phase: RunningPhase, callbacks: CallbackList, epoch: int, batch: int = 0, running: RunningLogs | None = None,
    after_execution: AfterExecution | None = None, last_batch: int | None = None,
    next_phase: RunningPhase | None = None,
) -> RunningLogs:
    """Runs an epoch from a batch and its running logs on; no execution crosses `last_batch`; returns the logs."""
    core, kind, timing = phase.core, phase.kind, phase.timing
    running = phase.compiled.empty_logs if running is None else running
    per_batch = callbacks.wants_batch_hooks(kind)
    agrees = core.strategy.spans_processes and callbacks.may_stop_differently(kind)
    one_by_one, first_batch = per_batch and not phase.compiled.is_asynchronous, batch
    if phase.arrays is not None and callbacks.run_user_code():  # which may write to the data
        phase.replace_stale_arrays()
    if _stops(core, kind, agrees):  # after an earlier stop, the epoch ends after a single batch
        one_by_one = True
    with Interrupts() as interrupts, phase.groups(epoch, batch) as groups:
        for group, start, stop in _executions(phase, groups, callbacks, one_by_one, last_batch):
            first, last = group.first + start, group.first + stop - 1
            if per_batch:
                with timing.callbacks:
                    getattr(callbacks, f"on_{kind}_batch_begin")(first, {})
            programs, is_first = phase.compiled.programs.count, batch == first_batch
            running = _execute(phase, group, start, stop, running, interrupts)
            if is_first and phase.compiled.programs.count > programs:
                _precompile(phase, 1 if one_by_one else phase.compiled.steps_per_execution)
                if next_phase is not None and not next_phase.compiled.programs.count:  # else compiled by an earlier run
                    _precompile(next_phase, next_phase.compiled.steps_per_execution)
            _queue(phase, group, stop - start, running)
            with timing.callbacks:
                logs = phase.lazy_logs(running)
                if per_batch:
                    getattr(callbacks, f"on_{kind}_batch_end")(last, logs)
                callbacks.on_execution_end(kind, last, logs)
            if after_execution is not None:
                after_execution(last + 1, running, group.resume_token)
            batch = last + 1
            if _stops(core, kind, agrees):
                break
    _agree_on_batches(phase, {"batches of the epoch": str(batch)})
    return running


def _agree_on_batches(phase: RunningPhase, description: Mapping[str, str]) -> None:
    """Raises ClusterError in all processes, before they could deadlock, if the positions of their pipelines differ."""
    core, timing = phase.core, phase.timing
    if core.strategy.spans_processes and phase.reader.arrays is None:
        with timing.agreement():
            core.strategy.process_group.assert_consistent("data", lambda: description)


def _executions(
    phase: RunningPhase, groups: Iterator[PlacedGroup], callbacks: CallbackList, one_by_one: bool,
    last_batch: int | None,
) -> Iterator[tuple[PlacedGroup, int, int]]:
    """Yields the batches of each execution, which ends at callbacks' sync points and at the run's `last_batch`."""
    has_sync_points = callbacks.wants("next_sync_step")
    # In a group of many executions, these have the same bounds as if each had its own group.
    steps = 1 if one_by_one else phase.compiled.steps_per_execution
    for group in _awaited(phase, groups):
        start = 0
        while start < group.count:
            stop = min((start // steps + 1) * steps, group.count)
            sync_step = callbacks.next_sync_step(phase.kind, group.first + start) if has_sync_points else None
            for number in (sync_step, last_batch):
                if number is not None:
                    stop = min(stop, number - group.first + 1)
            yield group, start, stop
            start = stop


def _awaited(phase: RunningPhase, groups: Iterator[PlacedGroup]) -> Iterator[PlacedGroup]:
    while True:
        with phase.timing.data:
            group = next(groups, None)
        if group is None:
            return
        yield group


def _execute(
    phase: RunningPhase, group: PlacedGroup, start: int, stop: int, running: RunningLogs, interrupts: Interrupts
) -> RunningLogs:
    holder, timing = phase.core.state, phase.timing
    executable = phase.compiled.executable(
        running, group=group, guard=phase.guard, timing=timing, start=start, stop=stop)
    # Waits for weights that were pending during the compilation.
    state = holder.current if phase.kind == "test" else holder.take_for_donation()
    timing.begin_steps(stop - start)
    if phase.kind == "test":
        return executable(state, running)
    # A train step donates the old state: Ctrl-C before the new state is stored would leave the model without a state.
    # An asynchronous step donates nothing, and may take long.
    with contextlib.nullcontext() if phase.compiled.is_asynchronous else interrupts.deferred:
        state, running = executable(state, running)
        holder.set(state)
    timing.rows += group.rows * (stop - start)
    return running


def _queue(phase: RunningPhase, group: PlacedGroup, steps: int, running: RunningLogs) -> None:
    """Records the start of an execution of some batches of `group`, and waits until few enough are queued."""
    most, strategy = MAX_IN_FLIGHT, phase.core.strategy
    if 1 < steps == group.count:
        most = MAX_WHOLE_GROUPS_IN_FLIGHT
    elif steps == 1 < group.count and not (strategy.is_on_cpu and strategy.mesh.size > 1):  # which can deadlock
        most = MAX_SINGLE_STEPS_IN_FLIGHT
    in_flight = phase.in_flight  # includes the previous epoch
    in_flight.append(running.sums["float32"])  # exists even without logs
    while len(in_flight) > most:
        with phase.timing.device:
            in_flight.popleft().block_until_ready()


def _stops(core: ModelCore, kind: Phase, agrees: bool) -> bool:
    """Returns whether a callback has asked to stop; with `agrees`, in any process, with the same result in all."""
    if agrees:
        with core.current_run.timing.agreement():
            if core.strategy.process_group.any(core.stops(kind)):
                core.set_stops(kind, True)
    return core.stops(kind)


def evaluate(core: ModelCore, readers: Mapping[str, Reader], callbacks: CallbackList) -> dict[str, Any]:
    """Returns the logs over the first epoch of each reader, or over the next batches of a one-shot source.

    Args:
      readers: the batches of each set, by name; the name is the prefix of the logs.
      callbacks: called as in Keras, for each set.
    """
    with core.current_run.timed(call="evaluate"):
        tests = [start_phase(core, "test", reader, passes=1, name=name) for name, reader in readers.items()]
        _distinct([name for test in tests for name in test.log_names])
        core.assert_consistent("data for `evaluate`", lambda: describe_sets(readers))
        return _evaluate(tests, callbacks)


def _evaluate(
    tests: Sequence[RunningPhase], callbacks: CallbackList, after_execution: AfterExecution | None = None
) -> dict[str, Any]:
    return {name: value for phase in tests for name, value in _evaluate_set(phase, callbacks, after_execution).items()}


def _evaluate_set(
    phase: RunningPhase, callbacks: CallbackList, after_execution: AfterExecution | None
) -> dict[str, Any]:
    phase.core.set_stops("test", False)
    with phase.timing.callbacks:
        callbacks.on_test_begin()
    with phase.timing.data:
        phase.reader.peek()  # raises if a generator is exhausted
    running = _run_epoch(phase, callbacks, epoch=0, after_execution=after_execution)
    logs = phase.lazy_logs(running)
    _store_metrics(phase, running, logs)
    with phase.timing.callbacks:
        callbacks.on_test_end(logs)
        return dict(logs)


def _store_metrics(phase: RunningPhase, running: RunningLogs, logs: Mapping[str, Any]) -> None:
    """Gives metric objects their results over an epoch, which Keras's metrics have after a run."""
    phase.compiled.store_metrics(running)
    if (loss := f"{phase.prefix}loss") in logs:
        phase.core.note_loss(logs[loss])


def _check_can_be_read_again(validation: Mapping[str, Reader], validations: int) -> None:
    for name, each in validation.items():
        if each.is_single_pass:
            argument = f"`validation_data[{name!r}]`" if name else "`validation_data`"
            raise ValueError(f"{argument} is a generator, which yields its batches once, but {validations} "
                             "validations are due. Pass data that can be iterated again, or `validation_steps`: each "
                             "validation then takes the next batches.")


@contextlib.contextmanager
def _naming_validation_data(name: str) -> Iterator[None]:
    """Adds a note to errors in the block that they are about `validation_data`, and about which set of several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        argument = f"validation_data[{name!r}]" if name else "validation_data"
        error.add_note(f"This error is about `{argument}`, and not about the data to train on.")
        raise


def _distinct(names: Sequence[str]) -> Sequence[str]:
    """Returns the names of logs, after checking that they are unique across data sets."""
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"Two sets of data would have the log {twice[0]!r}. Give one of them another name.")
    return names


def predict(core: ModelCore, reader: Reader, callbacks: CallbackList) -> Iterator[Any]:
    """Yields the outputs for each batch as host arrays, in input order and without padding.

    At most `MAX_IN_FLIGHT` executions run ahead of the yielded outputs.
    """
    core.set_stops("predict", False)
    with core.current_run.timed(call="predict") as timing:
        phase = start_phase(core, "predict", reader, passes=1)
        core.assert_consistent("data for `predict`", lambda: describe_data(reader))
        with timing.callbacks:
            callbacks.on_predict_begin()
        ahead: collections.deque[tuple[PlacedGroup, Any, int]] = collections.deque()
        agrees = core.strategy.spans_processes and callbacks.may_stop_differently("predict")
        with phase.groups(epoch=0) as groups:
            for group in _agreed_on(phase, _awaited(phase, groups)):
                programs = phase.compiled.programs.count
                executable = phase.compiled.executable(group=group, guard=phase.guard, timing=timing)
                outputs = executable(core.state.current)
                if group.first == 0 and phase.compiled.programs.count > programs:
                    _precompile(phase, phase.compiled.steps_per_execution)
                timing.begin_steps(group.count)
                with timing.callbacks:
                    count = _call_after_prediction(core, callbacks, group, outputs)
                ahead.append((group, outputs, count))
                phase.in_flight.append(jax.tree.leaves(outputs)[0])
                if len(ahead) > MAX_IN_FLIGHT:
                    phase.in_flight.popleft()
                    yield from _on_host(*ahead.popleft(), timing)
                if _stops(core, "predict", agrees):
                    break
        while ahead:
            yield from _on_host(*ahead.popleft(), timing)
        with timing.callbacks:
            callbacks.on_predict_end()


def _call_after_prediction(core: ModelCore, callbacks: CallbackList, group: PlacedGroup, outputs: PyTree) -> int:
    """Calls the hooks for a group; returns the number of its batches before `stop_predicting`."""
    def logs(index: int) -> LazyLogs:
        return LazyLogs(("outputs",), lambda: {"outputs": _batch_on_host(group, jax.device_get(outputs), index)})

    count = group.count
    if callbacks.wants_batch_hooks("predict"):
        for index in range(group.count):
            callbacks.on_predict_batch_begin(group.first + index, {})
            callbacks.on_predict_batch_end(group.first + index, logs(index))
            if core.stops("predict"):
                count = index + 1
                break
    callbacks.on_execution_end("predict", group.first + count - 1, logs(count - 1))
    return count


def run_on_batch(core: ModelCore, kind: Phase, reader: Reader) -> dict[str, Any]:
    """Runs the only batch of `reader` outside of any epoch; returns its logs on the host."""
    with core.current_run.timed(call=f"{kind}_on_batch", trains=kind == "train"):
        phase = start_phase(core, kind, reader, passes=1)
        group, = phase.stacks([phase.compiled.place_group(next(reader.read(0)))])
        with Interrupts() as interrupts:
            running = _execute(phase, group, 0, 1, phase.compiled.empty_logs, interrupts)
        return phase.compiled.fetch_results(running)


def compile_ahead(core: ModelCore, kind: Phase, reader: Reader, passes: int, is_sample: bool) -> None:
    """Compiles a phase for `passes` passes over the batches of `reader`, without running anything.

    This covers full batches and, for arrays, a shorter last batch. With `is_sample`, a single batch represents a stream
    of such batches.
    """
    with core.current_run.timed() as timing:
        phase = start_phase(core, kind, reader, passes, data_on_device=kind == "train" and not is_sample)
        running = () if kind == "predict" else (phase.compiled.empty_logs,)
        if reader.arrays is not None and reader.num_batches is not None and not is_sample:
            programs = _programs_of_arrays(phase, phase.compiled.steps_per_execution)
        else:
            buffer = GroupBuffer(reader.capacity)
            buffer.begin(reader.peek(), 0)
            programs = ((group, 1) for group in phase.stacks([phase.compiled.place_group(buffer.take())]))
        for group, steps in programs:
            phase.compiled.executable(*running, group=group, guard=phase.guard, timing=timing, stop=steps)
        if running:
            phase.compiled.fetch_results(phase.compiled.empty_logs)


def _programs_of_arrays(phase: RunningPhase, steps: int) -> Iterator[tuple[PlacedGroup, int]]:
    """Yields groups and step counts: whole executions, a shorter last execution, and a last batch of fewer rows."""
    reader = phase.reader
    batches = reader.num_batches
    assert batches is not None, "arrays of a known number of batches"
    first, last = (next(reader.read(0, start, phase.index_batches)) for start in (0, batches - 1))
    whole = batches - (last.rows != first.rows)
    placed = next(phase.stacks([phase.compiled.place_group(first, phase.arrays)]))
    yield placed, min(steps, whole)
    if whole > steps and whole % steps:
        yield placed, whole % steps
    if last.rows != first.rows:
        yield next(phase.stacks([phase.compiled.place_group(last, phase.arrays)])), 1


def _precompile(phase: RunningPhase, steps: int) -> None:
    """Starts to compile the programs of an epoch over arrays while accelerators compute, so that no epoch waits."""
    compiled, reader = phase.compiled, phase.reader
    if compiled.precompiles_in_background and reader.arrays is not None and reader.num_batches is not None:
        running = () if phase.kind == "predict" else (compiled.empty_logs,)
        for group, count in _programs_of_arrays(phase, steps):
            compiled.precompile(*running, group=group, guard=phase.guard, timing=phase.timing, steps=count)


def _agreed_on(phase: RunningPhase, groups: Iterator[PlacedGroup]) -> Iterator[PlacedGroup]:
    """Checks that every process has the next group, because `predict` gathers a group's outputs from all of them."""
    for group in groups:
        last = group.first + group.count - 1
        _agree_on_batches(phase, {"next batches": f"{group.first} to {last} ({group.rows} rows each)"})
        yield group
    _agree_on_batches(phase, {"next batches": "none"})


def _on_host(group: PlacedGroup, outputs: PyTree, count: int, timing: Timing) -> Iterator[Any]:
    with timing.device:
        outputs = jax.device_get(outputs)
    for index in range(count):
        yield _batch_on_host(group, outputs, index)


def _batch_on_host(group: PlacedGroup, outputs: PyTree, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index, : group.rows], outputs)


def _is_due(epoch: int, validation_freq: Any) -> bool:
    if isinstance(validation_freq, Container):
        return epoch + 1 in validation_freq
    return (epoch + 1) % validation_freq == 0


class Interrupts:
    """Defers Ctrl-C during critical blocks, as long as this context is open. It owns the signal handler of a run.

    The handler is set once and not for each block, because setting it takes longer than a small step. The handler that
    is deferred may be that of `BackupAndRestore(save_on_error=True)`, which ends the run at its next save point.

    Example:
      >>> with Interrupts() as interrupts:
      ...     with interrupts.deferred:
      ...         pass
    """

    def __init__(self) -> None:
        self.deferred = _Deferred()

    def __enter__(self) -> Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        # Python calls and sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self.deferred.handler = handler
            try:
                with self.deferred:
                    signal.signal(signal.SIGINT, self.deferred.handle)
            except BaseException:
                self._put_back()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self.deferred:
            self._put_back()

    def _put_back(self) -> None:
        # If other code has set a handler in the meantime, it stays.
        if self.deferred.handler is not None and signal.getsignal(signal.SIGINT) == self.deferred.handle:
            signal.signal(signal.SIGINT, self.deferred.handler)


class _Deferred:
    """A block that defers signals."""

    def __init__(self) -> None:
        self.handler: Any = None
        self._is_inside = False
        self._received: tuple[Any, ...] | None = None

    def handle(self, *signal_and_frame: Any) -> None:
        if self._is_inside:
            self._received = signal_and_frame
        else:
            self.handler(*signal_and_frame)

    def __enter__(self) -> None:
        self._is_inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_inside = False
        received, self._received = self._received, None
        if received is not None:
            self.handler(*received)
