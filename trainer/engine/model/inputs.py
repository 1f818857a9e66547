"""Conversion of the arguments of `fit`, `evaluate` and `predict` to readers of batches and lists of callbacks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.callbacks import BackupAndRestore, Callback, CallbackList, RunRecord, SpikeGuard
from trainer.core import arguments, errors
from trainer.core.files import storage
from trainer.core.types import ArrayTree, Data, Phase, PyTree, Verbose
from trainer.data import unpack_x_y_sample_weight
from trainer.data.adapt import adapt, split_validation
from trainer.data.reader import Reader
from trainer.data.sharding.auto_shard import policy_of
from trainer.data.sharding.processes import Processes
from trainer.data.sources.arrays import Batch, HostArrays, are_rows, is_array_tree, is_leaf, is_list_of_batches
from trainer.data.sources.class_weight import ClassWeights
from trainer.data.sources.dataset import DatasetSource
from trainer.data.sources.sources import Source
from trainer.engine.loop import loop
from trainer.engine.model.core.model_core import ModelCore, core_of
from trainer.engine.step.compiled_metrics import CompileMetrics
from trainer.engine.step.fusing import MAX_FUSED_STEPS

PHASES = ("train", "test", "predict")


@contextlib.contextmanager
def training_readers(
    core: ModelCore, x: Any, y: Any, sample_weight: Any, *, batch_size: int | None, shuffle: Any, class_weight: Any,
    steps_per_epoch: int | None, initial_epoch: int, validation_split: float, validation_data: Any,
    validation_steps: int | None, validation_batch_size: int | None, limit_batches: int | None, may_be_endless: bool,
) -> Iterator[tuple[Reader, dict[str, Reader]]]:
    """Yields the reader of the training data, and the readers of the validation sets by name, "" if unnamed."""
    if validation_split is not None and (not isinstance(validation_split, (int, float)) or validation_split):
        if validation_data is not None:
            raise ValueError("`validation_split` and `validation_data` cannot be used together.")
        x, validation_data = split_validation((x, y, sample_weight), validation_split)
    sets = {} if validation_data is None else sets_of("validation_data", validation_data)
    if isinstance(x, Mapping) and "" not in sets and sets.keys() == x.keys():
        raise ValueError(f"`validation_data` has the names of the inputs `x`, {', '.join(map(repr, sets))}. Of sets to "
                         "validate on, each needs a name of its own; one set of such inputs is `(inputs, targets)`, or "
                         "`(inputs,)` without targets.")
    x = core.strategy.training_data(x)
    named_sets = _by_argument("validation_data", sets)
    _agree_on_data(core, "fit", x=x, **(named_sets or {"validation_data": None}))
    processes = core.strategy.processes
    with contextlib.ExitStack() as readers:
        reader = readers.enter_context(Reader(
            adapt(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=core.state.seed,
                  class_weight=class_weight, steps=steps_per_epoch, processes=processes),
            steps_per_epoch, first_epoch=initial_epoch, limit_batches=limit_batches, may_be_endless=may_be_endless))
        yield reader, {
            name: readers.enter_context(Reader(
                _adapt_set(argument, data, validation_batch_size or batch_size, validation_steps, processes),
                validation_steps, limit_batches=limit_batches))
            for name, (argument, data) in zip(sets, named_sets.items(), strict=True)}


@contextlib.contextmanager
def evaluation_readers(
    core: ModelCore, x: Data | None, y: ArrayTree | None, sample_weight: ArrayTree | None, batch_size: int | None,
    steps: int | None,
) -> Iterator[dict[str, Reader]]:
    """Yields the readers of `evaluate` by the names of the sets; a single set has the name ""."""
    sets = sets_of("x", x) if y is None and sample_weight is None else {"": x}
    with contextlib.ExitStack() as readers:
        if "" in sets:
            yield {"": readers.enter_context(single_reader(
                core, "evaluate", x, y, sample_weight, batch_size=batch_size, steps=steps))}
            return
        arguments.check_count("steps", steps, 1, optional=True)
        named_sets = _by_argument("x", sets)
        _agree_on_data(core, "evaluate", **named_sets)
        yield {name: readers.enter_context(Reader(
            _adapt_set(argument, data, batch_size, steps, core.strategy.processes), steps))
            for name, (argument, data) in zip(sets, named_sets.items(), strict=True)}


def sets_of(argument: str, data: object) -> dict[str, Any]:
    """Returns a dict of data sets by name; data that are not such a dict get the name "".

    A dict of arrays, or of lists or dicts of arrays, is a single set of named inputs. The values of a dict of sets are
    tuples such as `(x, y)`, lists of batches, or other iterables of batches.

    Args:
      argument: name of the argument, for error messages.

    Raises:
      ValueError: for a dict with both kinds of values, or an empty name.
      TypeError: for a name that is not a string.

    >>> x, y = np.zeros((4, 2)), np.zeros(4)
    >>> list(sets_of("validation_data", {"clean": (x, y), "noisy": [(x, y), (x, y)]}))
    ['clean', 'noisy']
    >>> list(sets_of("validation_data", {"image": x, "mask": y}))
    ['']
    """
    if not isinstance(data, Mapping) or not data:
        return {"": data}
    are_sets = [isinstance(value, tuple) or not are_rows(value) for value in data.values()]
    if not any(are_sets):
        return {"": data}
    if not all(are_sets):
        names = [name for name, is_set in zip(data, are_sets, strict=True) if not is_set]
        raise ValueError(f"`{argument}` is a dict of sets of data, such as `(x, y)`, and of other values: "
                         f"{', '.join(map(repr, names))}. A set without targets is a tuple `(x,)`; inputs by name "
                         "with targets are a tuple `({name: array}, y)`.")
    for name in data:
        if not isinstance(name, str):
            raise errors.wrong_type(argument, name, "a dict of sets of data whose keys are strings")
        if not name:
            raise ValueError(f"`{argument}` has a set with an empty name. The names of its logs begin with it.")
    return dict(data)


def common_steps(readers: Mapping[str, Reader]) -> int | None:
    """Returns the number of batches that all sets share; None if their numbers differ."""
    counts = {reader.num_batches for reader in readers.values()}
    return counts.pop() if len(counts) == 1 else None


def single_reader(
    core: ModelCore, call: str, x: Data | None, y: ArrayTree | None = None, sample_weight: ArrayTree | None = None, *,
    batch_size: int | None, steps: int | None, may_be_endless: bool = False,
) -> Reader:
    """Returns the reader of `evaluate` or `predict`; `call` is the name of the method."""
    arguments.check_count("steps", steps, 1, optional=True)
    _agree_on_data(core, call, x=x)
    source = adapt(x, y, sample_weight, batch_size=batch_size, steps=steps, processes=core.strategy.processes)
    return Reader(source, steps, may_be_endless=may_be_endless)


def batch_reader(core: ModelCore, x: Data | None, y: ArrayTree | None, sample_weight: ArrayTree | None,
                 class_weight: dict[int, float] | None = None) -> Reader:
    """Returns the reader of one batch."""
    if class_weight is not None and sample_weight is None:  # a batch need not have a label of each class
        weights, class_weight = ClassWeights(class_weight), None
        sample_weight = weights(HostArrays.of((x, y, None)).tree[1])
    return Reader(adapt(x, y, sample_weight, batch_size=number_of_rows(x), class_weight=class_weight,
                        processes=core.strategy.processes), 1)


def compile_ahead(
    core: ModelCore, sample: Data, batch_size: int | None, epochs: int | None, phases: Sequence[Phase],
    steps_per_epoch: int | None,
) -> None:
    """Compiles phases for the sample data of `Model.compile_ahead`."""
    if isinstance(sample, (tuple, list)) and not sample:
        raise ValueError("`sample` is empty. Pass `(x, y)`, or a dataset.")
    parts = _array_parts(sample) or (sample,)
    is_sample = batch_size is None and are_rows(parts[0])
    if is_sample:
        batch_size = number_of_rows(parts[0])
    _agree_on_data(core, "compile_ahead", sample=sample)
    for kind in phases:
        # `predict` takes the inputs of arrays alone.
        source = adapt(*(parts[:1] if kind == "predict" else parts), batch_size=batch_size,
                       processes=core.strategy.processes)
        if source.is_one_shot:
            raise ValueError("`sample` must be data that can be read again. Received: a generator, whose first "
                             "batches `fit` would miss. Pass a batch of it.")
        if is_sample and isinstance(source, DatasetSource):  # a single batch represents a stream of such batches
            source = DatasetSource(source.dataset.repeat())
        # For endless data, any number of steps that fills a group works.
        many = MAX_FUSED_STEPS if source.num_batches == math.inf else None
        with Reader(source, steps_per_epoch or many) as reader:
            passes = 1 if is_sample or kind == "predict" else epochs or 2
            loop.compile_ahead(core, kind, reader, passes, is_sample)


def sample_batch(sample: Data, batch_size: int | None) -> Batch:
    """Returns the first batch of the sample data of `trainer.plan`, for all processes."""
    if isinstance(sample, (tuple, list)) and not sample:
        raise ValueError("`sample` is empty. Pass `(x, y)`, or a dataset.")
    parts = _array_parts(sample) or (sample,)
    if batch_size is None and are_rows(parts[0]):
        batch_size = number_of_rows(parts[0])
    with Reader(adapt(*parts, batch_size=batch_size), may_be_endless=True) as reader:
        return reader.peek()


def checked_phases(phases: object) -> Sequence[Phase]:
    """Returns a list of phase names from a single name or several."""
    phases = (phases,) if isinstance(phases, str) else phases
    if not isinstance(phases, (tuple, list)):
        raise errors.wrong_type("phases", phases, "a list of phases, such as ['train', 'test']")
    for kind in phases:
        if kind not in PHASES:
            raise errors.unknown_name("phase", str(kind), PHASES)
    return phases


def callback_list(model: object, callbacks: Any, verbose: Verbose, of_fit: bool = False,
                  **params: Any) -> CallbackList:
    """Returns the user's callbacks together with the default callbacks of a run."""
    verbose = arguments.check_verbose(verbose)
    if isinstance(callbacks, CallbackList):
        callbacks = callbacks.callbacks
    made = CallbackList(callbacks, add_history=of_fit, add_progbar=verbose != 0)
    if of_fit:
        _check_spike_guards(made.callbacks)
        made.callbacks += _records(made.callbacks)
    made.hold()
    try:
        made.set_model(model)
        made.set_params({"verbose": verbose, **params})
    except BaseException:
        made.let_go()
        raise
    return made


def _check_spike_guards(callbacks: Sequence[Callback]) -> None:
    """Checks that a `fit` has at most one `SpikeGuard`, and the checkpoints to which it goes back."""
    guards = [callback for callback in callbacks if isinstance(callback, SpikeGuard)]
    if len(guards) > 1:
        raise ValueError(f"`callbacks` has {len(guards)} `SpikeGuard`s, and a step has one rule. Give one of them.")
    wanted = guards[0].backup_dir if guards else None
    saved = [callback.backup_dir for callback in callbacks if isinstance(callback, BackupAndRestore)]
    if wanted is not None and storage.absolute(wanted) not in map(storage.absolute, saved):
        raise ValueError(f"`SpikeGuard` goes back to checkpoints in {wanted!r}, where no callback of this `fit` saves. "
                         f"Expected: a `BackupAndRestore({wanted!r})` beside it. Received: "
                         f"{', '.join(f'BackupAndRestore({folder!r})' for folder in saved) or 'none'}.")


def _records(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks that keep `run.json` in the folders of a `fit`'s callbacks."""
    recorded = {callback.folder for callback in callbacks if isinstance(callback, RunRecord)}
    folders = {storage.absolute(callback.run_folder) for callback in callbacks if callback.run_folder}
    return [RunRecord(folder) for folder in sorted(folders - recorded)]


def number_of_rows(x: PyTree) -> int:
    """Returns the number of rows of a batch of arrays."""
    if not are_rows(x):
        raise errors.wrong_type("x", x, "one batch: an array, or a tuple or dict of arrays")
    first = jax.tree.leaves(x, is_leaf=is_leaf)[0]
    return max(len(first), 1) if np.ndim(first) else 1


def as_list(model: Any, logs: dict[str, Any]) -> Any:
    """Returns the logs as Keras's list, or the only value.

    The order is the order of the model's metrics: the loss, the metrics of `compile`, the losses of several outputs,
    other metrics. All other logs, such as metrics of several outputs, come last, sorted by name.
    """
    names: list[str] = []
    compiled = core_of(model).configuration.tracked_metrics()
    for metric in model.metrics:
        names += metric.names if isinstance(metric, CompileMetrics) else [metric.name]
        if compiled and metric is compiled[-1]:
            names += [f"{entry.name}_loss" for entry in core_of(model).configuration.loss.per_output]
    known = [name for name in dict.fromkeys(names) if name in logs]
    values = [logs[name] for name in [*known, *sorted(logs.keys() - set(known))]]
    return values[0] if len(values) == 1 else values


def _by_argument(argument: str, sets: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{argument}[{name!r}]" if name else argument: data for name, data in sets.items()}


def _adapt_set(argument: str, data: object, batch_size: int | None, steps: int | None, processes: Processes) -> Source:
    try:
        parts = (data,) if isinstance(data, HostArrays) else _array_parts(data)
        return (adapt(data, processes=processes) if parts is None
                else adapt(*parts, batch_size=batch_size, steps=steps, processes=processes))
    except ValueError as error:
        raise ValueError(f"`{argument}` must be `(x, y)`, `(x, y, sample_weight)` or an iterable of batches. "
                         f"{error}") from error


def _array_parts(data: object) -> Sequence[Any] | None:
    """Returns a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays unchanged; None for other data."""
    if not isinstance(data, (tuple, list)) or not data or not is_array_tree(data[0]) or is_list_of_batches(data):
        return None
    unpack_x_y_sample_weight(data)  # rejects other numbers of elements
    return data


def _agree_on_data(core: ModelCore, call: str, **data: Any) -> None:
    """Raises ClusterError in all processes unless all make the same call with data that they share in the same way.

    It precedes all access to the data: processes that share them in different ways would wait for each other.
    """
    if core.strategy.spans_processes:
        with core.current_run.timed():
            core.assert_consistent(f"data for `{call}`", lambda: {
                f"auto_shard_policy of `{name}`": policy_of(value).value for name, value in data.items()})
