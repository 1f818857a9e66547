"""The only host loop: fit, evaluate and predict are phases of it.

It does not wait for the step that it has just begun: logs stay on the device until somebody reads them, and batches are
placed ahead, by a thread where that takes time. At most `MAX_IN_FLIGHT` executions are queued, which bounds the memory
of their batches and outputs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator
from typing import Any, Protocol

import jax

from trainer.alike import describe_run
from trainer.callbacks import CallbackList
from trainer.callbacks.lazy_logs import LazyLogs
from trainer.compile_guard import CompileGuard
from trainer.data import Demand, Group, Reader, prefetch
from trainer.data.batches import GroupBuffer, Mark
from trainer.distribute import Strategy, join_cluster
from trainer.distribute.agreement import anywhere, check_alike
from trainer.distribute.placement import PlacedGroup
from trainer.interrupts import Interrupts
from trainer.phase import CompiledPhase, on_host
from trainer.timing import Timing
from trainer.training_run import TrainingRun

MAX_IN_FLIGHT = 2

Running = Any  # the running logs of a phase, as it packs them
Reached = Callable[[int, Running, Mark | None], None]  # told how far an epoch is after each execution


class Trainee(Protocol):
    """What the loop needs of a model."""

    strategy: Strategy
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool
    timing: Timing
    validator: Callable[[], dict[str, Any]] | None  # while `fit` runs with validation data

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

    def run_settings(self) -> dict[str, Any]:
        """Returns, as plain data, what must not differ when a run is resumed."""

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
    timing: Timing | None = None,
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
      timing: the clock to use.
    """
    validations = sum(_is_due(epoch, validation_freq) for epoch in range(initial_epoch, epochs))
    if validation is not None and validation.is_single_pass and validations > 1:
        raise ValueError(f"`validation_data` is a generator, which yields its batches once, but {validations} "
                         "validations are due. Pass data that can be iterated anew, or `validation_steps`: each "
                         "validation then takes the next batches.")
    model.stop_training = False
    with _timed(model, timing) as timing:
        # All epochs count, not those that are left: a resumed run decides alike.
        train = _begin(model, "train", reader, passes=epochs, data_on_device=True)
        test = None if validation is None else _begin(model, "test", validation, passes=validations)
        validation_names = test.phase.log_names if test else ()
        check_alike("training", lambda: describe_run(
            reader, callbacks, epochs=epochs, initial_epoch=initial_epoch, logs=", ".join(train.phase.log_names),
            validation=None if test is None else test.reader.num_batches))
        callbacks.check_monitors([*train.phase.log_names, *(f"val_{name}" for name in validation_names)])
        run = TrainingRun(model, reader, validation, callbacks, train.phase.empty_logs, (initial_epoch, epochs), timing)
        with run, _validator(model, test, callbacks):
            with timing.measure("callbacks"):
                callbacks.on_train_begin()
            run.started()  # a resumed run goes on at another epoch, and may be in its middle or have stopped
            logs: Any = run.logs
            while run.epoch < epochs and not run.is_over:
                epoch = run.epoch
                if run.batch == 0:
                    if reader.ran_out():
                        break
                    with timing.measure("callbacks"):
                        callbacks.on_epoch_begin(epoch)
                if not run.is_epoch_over:
                    _run_epoch(model, train, callbacks, epoch, run.batch, run.running, run.trained)
                logs = _lazy_logs(train, run.running)
                if test is not None and _is_due(epoch, validation_freq):
                    test.reader.peek()  # a generator may have nothing left
                    run.validation_begins()
                    for name, value in _evaluate(model, test, callbacks, run.validated).items():
                        logs[f"val_{name}"] = value
                with timing.measure("callbacks"):
                    callbacks.on_epoch_end(epoch, logs)
                    _stops(model, "train", agrees=True)
                run.epoch_ended(logs)
            with timing.measure("callbacks"):
                callbacks.on_train_end(logs)


def evaluate(model: Trainee, reader: Reader, callbacks: CallbackList) -> dict[str, Any]:
    """Returns the logs over the first epoch of `reader`; a one-shot source has its next batches in its place."""
    with _timed(model):
        return _evaluate(model, _begin(model, "test", reader, passes=1), callbacks)


@contextlib.contextmanager
def _validator(model: Trainee, feed: _Feed | None, callbacks: CallbackList) -> Iterator[None]:
    """Lets callbacks validate in the middle of an epoch while the block runs."""
    outer = model.validator
    model.validator = None if feed is None else functools.partial(_evaluate, model, feed, callbacks)
    try:
        yield
    finally:
        model.validator = outer


def _evaluate(
    model: Trainee, feed: _Feed, callbacks: CallbackList, reached: Reached | None = None
) -> dict[str, Any]:
    model.stop_evaluating = False
    with feed.timing.measure("callbacks"):
        callbacks.on_test_begin()
    logs = _lazy_logs(feed, _run_epoch(model, feed, callbacks, epoch=0, reached=reached))
    with feed.timing.measure("callbacks"):
        callbacks.on_test_end(logs)
        return dict(logs)


def predict(model: Trainee, reader: Reader, callbacks: CallbackList) -> Iterator[Any]:
    """Yields the outputs for each batch as host arrays, in input order and without padding.

    At most `MAX_IN_FLIGHT` executions are ahead of the outputs that were yielded.
    """
    model.stop_predicting = False
    with _timed(model) as timing:
        feed = _begin(model, "predict", reader, passes=1)
        with timing.measure("callbacks"):
            callbacks.on_predict_begin()
        ahead: collections.deque[tuple[PlacedGroup, Any, int]] = collections.deque()
        agrees = callbacks.may_stop_differently("predict")
        with _placed(model, feed, epoch=0) as groups:
            for group in groups:
                state = model.current_state
                outputs = feed.phase.executable(state, group=group, guard=feed.guard, timing=timing)(state)
                with timing.measure("callbacks"):
                    count = _call_after_prediction(model, callbacks, group, outputs)
                ahead.append((group, outputs, count))
                if len(ahead) > MAX_IN_FLIGHT:
                    yield from _on_host(*ahead.popleft(), timing)
                if _stops(model, "predict", agrees):
                    break
        while ahead:
            yield from _on_host(*ahead.popleft(), timing)
        with timing.measure("callbacks"):
            callbacks.on_predict_end()


def _call_after_prediction(model: Trainee, callbacks: CallbackList, group: PlacedGroup, outputs: Any) -> int:
    """Calls the hooks for a group; returns how many of its batches came before `stop_predicting`.

    Outputs are stacked, so batches are not run one by one even if a callback wants to see each.
    """
    def logs(index: int) -> LazyLogs:
        return LazyLogs(("outputs",), lambda: {"outputs": _batch_on_host(group, jax.device_get(outputs), index)})

    count = group.count
    if callbacks.wants_batch_hooks("predict"):
        for index in range(group.count):
            callbacks.on_predict_batch_begin(group.first + index, {})
            callbacks.on_predict_batch_end(group.first + index, logs(index))
            if model.stop_predicting:
                count = index + 1
                break
    callbacks.on_execution_end("predict", group.first + count - 1, logs(count - 1))
    return count


def run_on_batch(model: Trainee, kind: str, reader: Reader) -> dict[str, Any]:
    """Runs the one batch of `reader` outside of any epoch; returns its logs, fetched."""
    with _timed(model):
        feed = _begin(model, kind, reader, passes=1)
        group = model.strategy.place_group(next(reader.read(0)))
        with feed.interrupts:
            running = _execute(model, feed, group, 0, 1, feed.phase.empty_logs)
        return feed.phase.fetch_results(running)


def compile_ahead(model: Trainee, kind: str, reader: Reader, passes: int, is_sample: bool) -> None:
    """Compiles a phase for the batches of `reader` as a run that reads them `passes` times would, running nothing.

    That is for full batches and, of arrays, for a shorter last one.

    Args:
      model: the model.
      kind: "train", "test" or "predict".
      reader: the batches.
      passes: how often they will be read.
      is_sample: whether there is one batch that stands for a stream of such batches.
    """
    with _timed(model) as timing:
        feed = _begin(model, kind, reader, passes, data_on_device=kind == "train" and not is_sample)
        running = () if kind == "predict" else (feed.phase.empty_logs,)
        if reader.arrays is not None and reader.num_batches is not None and not is_sample:
            starts = sorted({0, reader.num_batches - 1})
            groups = [next(reader.read(0, start, feed.arrays is not None)) for start in starts]
        else:
            buffer = GroupBuffer(reader.group_size if is_sample else reader.room)
            buffer.add(reader.peek(), 0)
            groups = [buffer.take()]
        for group in groups:
            placed = model.strategy.place_group(group, feed.arrays)
            feed.phase.executable(model.current_state, *running, group=placed, guard=feed.guard, timing=timing)
        if running:
            feed.phase.fetch_results(feed.phase.empty_logs)


@contextlib.contextmanager
def _timed(model: Trainee, timing: Timing | None = None) -> Iterator[Timing]:
    """Gives the model a clock of its own for a run; one inside of another run gives the clock back at its end."""
    outer = model.timing
    timing = model.timing = timing or Timing()
    watchdog = join_cluster.watchdog()
    if watchdog is not None:
        timing.on_phase = lambda phase: watchdog.progress(timing.steps, phase)
        timing.on_phase("host")
    try:
        yield timing
    finally:
        timing.end()
        if watchdog is not None:
            watchdog.progress(timing.steps, "host" if outer.is_running else "idle")
        if outer.is_running:
            outer.inner_secs += timing.report()["total"]
            model.timing = outer


@dataclasses.dataclass(frozen=True)
class _Feed:
    """What a phase runs on.

    Attributes:
      kind: "train", "test" or "predict".
      phase: the compiled step.
      reader: yields the batches.
      arrays: the reader's arrays on the devices, where batches are gathered from them.
      labels_are_checked: whether no label of the arrays on the devices is outside of the model's classes.
      guard: watches the compilations of the run.
      timing: the clock of the run.
      interrupts: holds off Ctrl-C.
    """

    kind: str
    phase: CompiledPhase
    reader: Reader
    arrays: Any | None
    labels_are_checked: bool
    guard: CompileGuard
    timing: Timing
    interrupts: Interrupts = dataclasses.field(default_factory=Interrupts)


def _begin(model: Trainee, kind: str, reader: Reader, passes: int, data_on_device: bool = False) -> _Feed:
    timing = model.timing
    with timing.measure("data"):
        batch = reader.peek()
    with timing.measure("compile"):
        phase = model.prepared_phase(kind, batch)
    reader.group_size = phase.steps_per_execution
    with timing.measure("data"):
        arrays = model.place_arrays(reader, passes, data_on_device)
        is_checked = kind == "predict" or (arrays is not None and _has_good_labels(model, reader))
    return _Feed(kind, phase, reader, arrays, is_checked, phase.new_guard(), timing)


def _has_good_labels(model: Trainee, reader: Reader) -> bool:
    try:
        model.check_labels(reader.arrays.tree if reader.arrays is not None else None)
    except ValueError:
        return False  # maybe in rows that are never read: each batch will be looked at
    return True


def _run_epoch(
    model: Trainee, feed: _Feed, callbacks: CallbackList, epoch: int, batch: int = 0, running: Running = None,
    reached: Reached | None = None,
) -> Running:
    """Runs an epoch from its batch number `batch` on, before which it had the logs `running`; returns those at its end.

    `reached` is told after each execution, and all callbacks before it.
    """
    kind, timing = feed.kind, feed.timing
    running = feed.phase.empty_logs if running is None else running
    in_flight: collections.deque[Any] = collections.deque()
    per_batch = callbacks.wants_batch_hooks(kind)
    agrees = callbacks.may_stop_differently(kind)
    with feed.interrupts, _placed(model, feed, epoch, batch) as groups:
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
            if reached is not None:
                reached(last + 1, running, group.mark)
            if _stops(model, kind, agrees):
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
    executable = feed.phase.executable(
        model.current_state, running, group=group, guard=feed.guard, timing=feed.timing, start=start, stop=stop)
    feed.timing.steps += stop - start
    if feed.kind == "test":
        return executable(model.current_state, running)
    # Between a step, which donates the old state, and the storing of the new one, Ctrl-C would leave the model without.
    with feed.interrupts.deferred:
        state, running = executable(model.take_state(), running)
        model.keep_state(state)
    feed.timing.rows += group.rows * (stop - start)
    return running


@contextlib.contextmanager
def _placed(model: Trainee, feed: _Feed, epoch: int, batch: int = 0) -> Iterator[Iterator[PlacedGroup]]:
    """Gives an epoch's groups on the devices, from a batch on; where batches are sent there, a thread is ahead."""
    def place(group: Group) -> PlacedGroup:
        if not feed.labels_are_checked:
            rows = jax.tree.map(lambda leaf: leaf[:group.count], group.data)
            model.check_labels(feed.reader.rows(rows) if feed.arrays is not None else rows)
        return model.strategy.place_group(group, feed.arrays)

    if feed.arrays is not None:
        # Row numbers are placed in no time: a thread would only compete for the interpreter.
        with contextlib.closing(feed.reader.read(epoch, batch, row_numbers=True)) as groups:
            yield map(place, groups)
        return
    demand = Demand()
    # Several processes must run the same executions, so none of them may end a group for having waited.
    is_urgent = demand.is_urgent if jax.process_count() == 1 else lambda: False
    with prefetch(feed.reader.read(epoch, batch, is_urgent=is_urgent), place, demand=demand) as placed:
        yield placed


def _stops(model: Trainee, kind: str, agrees: bool) -> bool:
    """Returns whether somebody has asked to stop; with `agrees`, in any of the processes, of which all get to know."""
    flag = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}[kind]
    if agrees and anywhere(bool(getattr(model, flag))):
        setattr(model, flag, True)
    return bool(getattr(model, flag))


def _lazy_logs(feed: _Feed, running: Running) -> LazyLogs:
    begin = functools.cache(lambda: feed.phase.begin_results(running))

    def fetch() -> dict[str, Any]:
        with feed.timing.measure("device"):
            return on_host(begin())

    return LazyLogs(feed.phase.log_names, fetch, begin)


def _on_host(group: PlacedGroup, outputs: Any, count: int, timing: Timing) -> Iterator[Any]:
    with timing.measure("device"):
        outputs = jax.device_get(outputs)
    for index in range(count):
        yield _batch_on_host(group, outputs, index)


def _batch_on_host(group: PlacedGroup, outputs: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index, : group.rows], outputs)


def _is_due(epoch: int, validation_freq: Any) -> bool:
    if isinstance(validation_freq, Container):
        return epoch + 1 in validation_freq
    return (epoch + 1) % validation_freq == 0
