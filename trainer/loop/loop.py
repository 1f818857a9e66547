"""The only host loop: fit, evaluate and predict are phases of it.

It does not wait for the step that it has just begun: logs stay on the device until they are read, and batches are
placed ahead, by a thread where that saves time. Few executions are queued (see `MAX_IN_FLIGHT`), which bounds the
memory of their batches and outputs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax

from trainer.callbacks import CallbackList
from trainer.callbacks.base.lazy_logs import LazyLogs
from trainer.core.timing import Timing
from trainer.core.types import Phase, PyTree
from trainer.data.reader import Reader
from trainer.data.sharding.auto_shard import policy_of
from trainer.data.sources.batches import GroupBuffer, ResumeToken
from trainer.distribute.placement.placement import PlacedGroup
from trainer.loop.phase_input import PhaseInput, start_phase
from trainer.loop.resumable_run import TrainingRun
from trainer.loop.run_limits import RunLimits
from trainer.model.core.model_core import ModelCore
from trainer.model.core.run_fingerprint import describe_data, describe_run, describe_sets

# How many executions may not have ended when the next begins.
MAX_IN_FLIGHT = 2
MAX_WHOLE_GROUPS_IN_FLIGHT = 1  # they hold many batches each, and take much longer than a dispatch
MAX_SINGLE_STEPS_IN_FLIGHT = 8  # of a group; they are cheap, and the batches of all take no more memory than the group

_NO_SETS: Mapping[str, Reader] = {}

Running = Any  # the running logs of a phase
Reached = Callable[[int, Running, ResumeToken | None], None]  # called with how far an epoch is, after each execution


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
      callbacks: called as in Keras; whatever is recorded of the run, they record.
      epochs: the number after that of the last epoch.
      initial_epoch: the number of the first epoch.
      validation: sets of batches to evaluate one after another at the end of an epoch, by their names, which their
        logs begin with; a single set may have the name "".
      validation_freq: evaluate every so many epochs, or in the epochs listed (counted from 1).
      timing: the clock to use.
      limits: what ends the run before.
    """
    limits = limits or RunLimits()
    validations = sum(_is_due(epoch, validation_freq) for epoch in range(initial_epoch, epochs))
    for name, each in validation.items():
        if each.is_single_pass and validations > 1:
            argument = f"`validation_data[{name!r}]`" if name else "`validation_data`"
            raise ValueError(f"{argument} is a generator, which yields its batches once, but {validations} "
                             "validations are due. Pass data that can be iterated again, or `validation_steps`: each "
                             "validation then takes the next batches.")
    core.set_stops("train", False)
    with core.run.timed(timing) as timing:
        # All epochs count, not those that are left: a resumed run decides the same.
        train = start_phase(core, "train", reader, passes=epochs, data_on_device=True)
        tests = []
        for name, each in validation.items():
            with _naming_validation_data(name):
                tests.append(start_phase(core, "test", each, passes=validations, name=name))
        validation_names = _distinct([f"val_{name}" for test in tests for name in test.log_names])
        _assert_consistent(core, "training", lambda: describe_run(
            reader, validation, callbacks, epochs=epochs, initial_epoch=initial_epoch,
            logs=", ".join(train.phase.log_names), validation_freq=validation_freq, **limits.describe()))
        callbacks.check_monitors([*train.log_names, *validation_names])
        run = TrainingRun(
            core, reader, validation, callbacks, train.phase.empty_logs, (initial_epoch, epochs), timing, limits)
        validator = functools.partial(_evaluate, tests, callbacks) if tests else None
        with run, core.run.validating(validator, list(validation)):
            with timing.measure("callbacks"):
                callbacks.on_train_begin()
            run.started()  # a resumed run goes on at another epoch, and may be in its middle or have stopped
            logs: Any = run.logs
            trained: Running = None
            while run.epoch < epochs and not run.is_over:
                epoch = run.epoch
                if run.batch == 0:
                    ran_out = reader.ran_out()
                    _agree_on_batches(train, {"has run out of data": str(ran_out)})
                    if ran_out:
                        break
                    with timing.measure("callbacks"):
                        callbacks.on_epoch_begin(epoch)
                if not run.is_epoch_over:
                    if epoch + 1 < epochs:
                        reader.prepare(epoch + 1)
                    _run_epoch(train, callbacks, epoch, run.batch, run.running, run.trained, run.last_batch,
                               next(iter(tests), None))
                    if epoch + 1 < epochs and not core.stops("train"):
                        train.look_ahead(epoch + 1)
                logs = train.lazy_logs(run.running)
                run.epoch_trained()
                if tests and _is_due(epoch, validation_freq):
                    for name, value in _evaluate(tests, callbacks, run.validated).items():
                        logs[f"val_{name}"] = value
                with timing.measure("callbacks"):
                    callbacks.on_epoch_end(epoch, logs)
                _stops(core, "train", core.strategy.spans_processes)
                trained = run.running
                run.epoch_ended(logs)
            if not tests and trained is not None:
                _store_metrics(train, trained, logs)
            with timing.measure("callbacks"):
                callbacks.on_train_end(logs)


def evaluate(core: ModelCore, readers: Mapping[str, Reader], callbacks: CallbackList) -> dict[str, Any]:
    """Returns the logs over the first epoch of each reader; of a one-shot source, over its next batches.

    Args:
      core: the model.
      readers: the batches; of several sets by the names that their logs begin with.
      callbacks: called as in Keras, for each set.
    """
    with core.run.timed():
        tests = [start_phase(core, "test", reader, passes=1, name=name) for name, reader in readers.items()]
        _distinct([name for test in tests for name in test.log_names])
        _assert_consistent(core, "data for `evaluate`", lambda: describe_sets(readers))
        return _evaluate(tests, callbacks)


def _evaluate(
    tests: Sequence[PhaseInput], callbacks: CallbackList, reached: Reached | None = None
) -> dict[str, Any]:
    return {name: value for inputs in tests for name, value in _evaluate_set(inputs, callbacks, reached).items()}


def _evaluate_set(inputs: PhaseInput, callbacks: CallbackList, reached: Reached | None) -> dict[str, Any]:
    inputs.core.set_stops("test", False)
    with inputs.timing.measure("callbacks"):
        callbacks.on_test_begin()
    with inputs.timing.measure("data"):
        inputs.reader.peek()  # a generator may have nothing left
    running = _run_epoch(inputs, callbacks, epoch=0, reached=reached)
    logs = inputs.lazy_logs(running)
    _store_metrics(inputs, running, logs)
    with inputs.timing.measure("callbacks"):
        callbacks.on_test_end(logs)
        return dict(logs)


def _store_metrics(inputs: PhaseInput, running: Running, logs: Mapping[str, Any]) -> None:
    """Gives metric objects what an epoch has accumulated, as Keras's have it after a run."""
    inputs.phase.store_metrics(running)
    if (loss := inputs.log_name("loss")) in logs:
        inputs.core.note_loss(logs[loss])


@contextlib.contextmanager
def _naming_validation_data(name: str) -> Iterator[None]:
    """Adds to errors of the block that they are of `validation_data`, of the set of that name, if there are several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        argument = f"validation_data[{name!r}]" if name else "validation_data"
        error.add_note(f"This error is about `{argument}`, and not about the data to train on.")
        raise


def _distinct(names: Sequence[str]) -> Sequence[str]:
    """Returns the names of logs, after checking that sets of data give no two logs one name."""
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"Two sets of data would have the log {twice[0]!r}. Give one of them another name.")
    return names


def predict(core: ModelCore, reader: Reader, callbacks: CallbackList) -> Iterator[Any]:
    """Yields the outputs for each batch as host arrays, in input order and without padding.

    At most `MAX_IN_FLIGHT` executions are ahead of the outputs that were yielded.
    """
    core.set_stops("predict", False)
    with core.run.timed() as timing:
        inputs = start_phase(core, "predict", reader, passes=1)
        _assert_consistent(core, "data for `predict`", lambda: describe_data(reader))
        with timing.measure("callbacks"):
            callbacks.on_predict_begin()
        ahead: collections.deque[tuple[PlacedGroup, Any, int]] = collections.deque()
        agrees = core.strategy.spans_processes and callbacks.may_stop_differently("predict")
        with inputs.groups(epoch=0) as groups:
            for group in _agreed_on(inputs, _awaited(inputs, groups)):
                programs = inputs.phase.num_programs
                executable = inputs.phase.executable(
                    core.state.state_or_shapes, group=group, guard=inputs.guard, timing=timing)
                outputs = executable(core.state.current)
                if group.first == 0 and inputs.phase.num_programs > programs:
                    _precompile(inputs, inputs.reader.group_size)
                timing.begin_steps(group.count)
                with timing.measure("callbacks"):
                    count = _call_after_prediction(core, callbacks, group, outputs)
                ahead.append((group, outputs, count))
                inputs.in_flight.append(jax.tree.leaves(outputs)[0])
                if len(ahead) > MAX_IN_FLIGHT:
                    inputs.in_flight.popleft()
                    yield from _on_host(*ahead.popleft(), timing)
                if _stops(core, "predict", agrees):
                    break
        while ahead:
            yield from _on_host(*ahead.popleft(), timing)
        with timing.measure("callbacks"):
            callbacks.on_predict_end()


def _call_after_prediction(core: ModelCore, callbacks: CallbackList, group: PlacedGroup, outputs: PyTree) -> int:
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
            if core.stops("predict"):
                count = index + 1
                break
    callbacks.on_execution_end("predict", group.first + count - 1, logs(count - 1))
    return count


def run_on_batch(core: ModelCore, kind: Phase, reader: Reader) -> dict[str, Any]:
    """Runs the one batch of `reader` outside of any epoch; returns its logs, fetched."""
    with core.run.timed():
        inputs = start_phase(core, kind, reader, passes=1)
        group, = inputs.stacks([inputs.phase.place_group(next(reader.read(0)))])
        with inputs.interrupts:
            running = _execute(inputs, group, 0, 1, inputs.phase.empty_logs)
        return inputs.phase.fetch_results(running)


def compile_ahead(core: ModelCore, kind: Phase, reader: Reader, passes: int, is_sample: bool) -> None:
    """Compiles a phase for the batches of `reader` as a run that reads them `passes` times would, running nothing.

    That is for full batches and, of arrays, for a shorter last one.

    Args:
      core: the model.
      kind: "train", "test" or "predict".
      reader: the batches.
      passes: how often they will be read.
      is_sample: whether there is one batch that stands for a stream of such batches.
    """
    with core.run.timed() as timing:
        inputs = start_phase(core, kind, reader, passes, data_on_device=kind == "train" and not is_sample)
        running = () if kind == "predict" else (inputs.phase.empty_logs,)
        if reader.arrays is not None and reader.num_batches is not None and not is_sample:
            programs = _programs_of_arrays(inputs, reader.group_size)
        else:
            if is_sample:  # of what a pipeline yields, though it is an array
                reader.group_size = inputs.phase.steps_per_execution
            buffer = GroupBuffer(reader.capacity)
            buffer.begin(reader.peek(), 0)
            programs = ((group, 1) for group in inputs.stacks([inputs.phase.place_group(buffer.take())]))
        for group, steps in programs:
            inputs.phase.executable(
                core.state.state_or_shapes, *running, group=group, guard=inputs.guard, timing=timing, stop=steps)
        if running:
            inputs.phase.fetch_results(inputs.phase.empty_logs)


def _programs_of_arrays(inputs: PhaseInput, steps: int) -> Iterator[tuple[PlacedGroup, int]]:
    """Yields what an epoch over arrays needs programs for: groups of batches, and how many of theirs run at once.

    These are whole executions, a last one of fewer steps, and a last batch of fewer rows.

    Args:
      inputs: what the epoch runs on.
      steps: how many steps an execution has.
    """
    reader = inputs.reader
    batches = reader.num_batches
    assert batches is not None, "arrays of a known number of batches"
    first, last = (next(reader.read(0, start, inputs.numbers_of)) for start in (0, batches - 1))
    whole = batches - (last.rows != first.rows)
    placed = next(inputs.stacks([inputs.phase.place_group(first, inputs.arrays)]))
    yield placed, min(steps, whole)
    if whole > steps and whole % steps:
        yield placed, whole % steps
    if last.rows != first.rows:
        yield next(inputs.stacks([inputs.phase.place_group(last, inputs.arrays)])), 1


def _precompile(inputs: PhaseInput, steps: int) -> None:
    """Begins to compile what an epoch over arrays will need, while devices that are no CPUs compute.

    An epoch would else stop for the compilation of its last batch, or of its validation.

    Args:
      inputs: what the epoch runs on.
      steps: how many steps an execution has.
    """
    phase, reader = inputs.phase, inputs.reader
    if phase.precompiles_in_background and reader.arrays is not None and reader.num_batches is not None:
        running = () if inputs.kind == "predict" else (phase.empty_logs,)
        for group, count in _programs_of_arrays(inputs, steps):
            phase.precompile(inputs.core.state.state_or_shapes, *running, group=group, guard=inputs.guard,
                                 timing=inputs.timing, steps=count)


def _run_epoch(
    inputs: PhaseInput, callbacks: CallbackList, epoch: int, batch: int = 0, running: Running = None,
    reached: Reached | None = None, last_of_run: int | None = None, next_phase: PhaseInput | None = None,
) -> Running:
    """Runs an epoch from its batch number `batch` on, before which it had the logs `running`; returns those at its end.

    `reached` is called after each execution, after all callbacks. No execution goes beyond the batch `last_of_run`. If
    the first execution had to be compiled, other programs of the epoch and of `next_phase` are compiled beside it.
    """
    core, kind, timing = inputs.core, inputs.kind, inputs.timing
    running = inputs.phase.empty_logs if running is None else running
    per_batch = callbacks.wants_batch_hooks(kind)
    agrees = core.strategy.spans_processes and callbacks.may_stop_differently(kind)
    one_by_one, begun = per_batch and not inputs.phase.is_asynchronous, batch
    one_by_one = _stops(core, kind, agrees) or one_by_one  # asked before the epoch, it ends after one batch
    with inputs.interrupts, inputs.groups(epoch, batch) as groups:
        for group, start, stop in _executions(inputs, groups, callbacks, one_by_one, last_of_run):
            first, last = group.first + start, group.first + stop - 1
            if per_batch:
                with timing.measure("callbacks"):
                    getattr(callbacks, f"on_{kind}_batch_begin")(first, {})
            programs, is_first = inputs.phase.num_programs, batch == begun
            running = _execute(inputs, group, start, stop, running)
            if is_first and inputs.phase.num_programs > programs:
                _precompile(inputs, 1 if one_by_one else inputs.reader.group_size)
                if next_phase is not None and next_phase.phase.num_programs == 0:  # a run before has compiled all else
                    _precompile(next_phase, next_phase.reader.group_size)
            _queue(inputs, group, stop - start, running)
            with timing.measure("callbacks"):
                logs = inputs.lazy_logs(running)
                if per_batch:
                    getattr(callbacks, f"on_{kind}_batch_end")(last, logs)
                callbacks.on_execution_end(kind, last, logs)
            if reached is not None:
                reached(last + 1, running, group.resume_token)
            batch = last + 1
            if _stops(core, kind, agrees):
                break
    _agree_on_batches(inputs, {"batches of the epoch": str(batch)})
    return running


def _agree_on_batches(inputs: PhaseInput, description: Mapping[str, str]) -> None:
    """Raises ClusterError in all processes if pipelines of theirs have not come equally far.

    Before anything else runs over the devices of all: a process with further batches waits there for those without.
    """
    core, timing = inputs.core, inputs.timing
    if core.strategy.spans_processes and inputs.reader.arrays is None:
        with timing.measure("device"):
            timing.tell("agreement")
            core.strategy.process_group.assert_consistent("data", lambda: description)


def _agreed_on(inputs: PhaseInput, groups: Iterator[PlacedGroup]) -> Iterator[PlacedGroup]:
    """Yields groups that all processes have: the outputs of a group come together as one array, of which a process with
    fewer batches would leave others with rows that none has computed."""
    for group in groups:
        last = group.first + group.count - 1
        _agree_on_batches(inputs, {"next batches": f"{group.first} to {last} ({group.rows} rows each)"})
        yield group
    _agree_on_batches(inputs, {"next batches": "none"})


def _executions(
    inputs: PhaseInput, groups: Iterator[PlacedGroup], callbacks: CallbackList, one_by_one: bool, last: int | None
) -> Iterator[tuple[PlacedGroup, int, int]]:
    """Yields `(group, start, stop)`: which batches of which group to execute at once.

    That is as many as go into one execution, unless they go one by one, or a callback has a sync point or the run its
    `last` batch in the middle.
    """
    has_sync_points = callbacks.wants("next_sync_step")
    # Where a group is of many executions, these end where they would if each had a group of its own.
    steps = 1 if one_by_one else inputs.reader.group_size
    for group in _awaited(inputs, groups):
        start = 0
        while start < group.count:
            stop = min((start // steps + 1) * steps, group.count)
            sync_step = callbacks.next_sync_step(inputs.kind, group.first + start) if has_sync_points else None
            for number in (sync_step, last):
                if number is not None:
                    stop = min(stop, number - group.first + 1)
            yield group, start, stop
            start = stop


def _awaited(inputs: PhaseInput, groups: Iterator[PlacedGroup]) -> Iterator[PlacedGroup]:
    while True:
        with inputs.timing.measure("data"):
            group = next(groups, None)
        if group is None:
            return
        yield group


def _execute(inputs: PhaseInput, group: PlacedGroup, start: int, stop: int, running: Running) -> Running:
    held, timing = inputs.core.state, inputs.timing
    executable = inputs.phase.executable(
        held.state_or_shapes, running, group=group, guard=inputs.guard, timing=timing, start=start, stop=stop)
    present = held.current  # its weights may still have been made during the compilation
    timing.begin_steps(stop - start)
    if inputs.kind == "test":
        return executable(present, running)
    # Between a step, which donates the old state, and the storing of the new one, Ctrl-C would leave the model without.
    # An asynchronous one donates nothing, and may take long.
    with contextlib.nullcontext() if inputs.phase.is_asynchronous else inputs.interrupts.deferred:
        state, running = executable(held.take_for_donation(), running)
        held.set(state)
    timing.rows += group.rows * (stop - start)
    return running


def _queue(inputs: PhaseInput, group: PlacedGroup, steps: int, running: Running) -> None:
    """Notes that an execution of some batches of `group` has begun, and waits until few enough are queued."""
    most, strategy = MAX_IN_FLIGHT, inputs.core.strategy
    if 1 < steps == group.count:
        most = MAX_WHOLE_GROUPS_IN_FLIGHT
    elif steps == 1 < group.count and not (strategy.is_on_cpu and strategy.mesh.size > 1):  # which can lock each other
        most = MAX_SINGLE_STEPS_IN_FLIGHT
    in_flight = inputs.in_flight  # of the epoch before, too
    in_flight.append(running.sums["float32"])  # which are there even without logs
    while len(in_flight) > most:
        with inputs.timing.measure("device"):
            in_flight.popleft().block_until_ready()


def _stops(core: ModelCore, kind: Phase, agrees: bool) -> bool:
    """Returns whether a callback has asked to stop; with `agrees`, in any process, of which all get to know."""
    if agrees:
        with core.run.timing.measure("device"):  # or for other processes, which is the same to a watchdog
            if core.strategy.process_group.any(core.stops(kind)):
                core.set_stops(kind, True)
    return core.stops(kind)


def _on_host(group: PlacedGroup, outputs: PyTree, count: int, timing: Timing) -> Iterator[Any]:
    with timing.measure("device"):
        outputs = jax.device_get(outputs)
    for index in range(count):
        yield _batch_on_host(group, outputs, index)


def _batch_on_host(group: PlacedGroup, outputs: PyTree, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index, : group.rows], outputs)


def _assert_consistent(core: ModelCore, what: str, describe: Callable[[], Mapping[str, str]]) -> None:
    if core.strategy.spans_processes:
        with core.run.timing.measure("device"):  # or for other processes, which is the same to a watchdog
            core.strategy.process_group.assert_consistent(what, describe)


def agree_on_data(core: ModelCore, call: str, **data: Any) -> None:
    """Raises ClusterError in all processes unless all make this call, with data that they share in the same way.

    It goes before the data are looked at: processes that share them in different ways would wait for each other.

    Args:
      core: whose method is called.
      call: the method.
      **data: the user's, by the argument's name.
    """
    if core.strategy.spans_processes:
        with core.run.timed():
            _assert_consistent(core, f"data for `{call}`", lambda: {
                f"auto_shard_policy of `{name}`": policy_of(value).value for name, value in data.items()})


def _is_due(epoch: int, validation_freq: Any) -> bool:
    if isinstance(validation_freq, Container):
        return epoch + 1 in validation_freq
    return (epoch + 1) % validation_freq == 0
