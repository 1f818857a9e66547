"""TrainingRun: the progress of a `fit`, its limits, and the content of its checkpoints.

Owns the saved content, and the restoration of a run. `engine/saving/checkpoint` defines the files of a checkpoint, and
callbacks decide when to save.
"""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax

from trainer.callbacks import CallbackList
from trainer.core import arguments, tree_paths
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import brief, naming_file, see
from trainer.core.received_text import printable
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState
from trainer.data.reader import Reader
from trainer.data.sources.arrays import DataError
from trainer.data.sources.groups import ResumeToken
from trainer.distribute import Strategy
from trainer.distribute.cluster import package_versions, reached_preemption_sync_point
from trainer.engine.loop import begun_run
from trainer.engine.model.core.model_core import ModelCore
from trainer.engine.model.core.run_fingerprint import describe_platform
from trainer.engine.saving.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    is_checkpoint,
    open_checkpoint,
)
from trainer.engine.step.running_logs import RunningLogs

_KIND = "run"
_KEYS: dict[str, type] = {
    **dict.fromkeys(("epoch", "batch", "batches", "initial_epoch", "epochs"), int), "logs": object, "settings": Mapping,
    "stop_training": bool, "data": object, "validation": object, "validation_sets": Mapping, "fingerprint": Mapping,
    "callbacks": object}
_PROGRAMS = "programs"  # in the settings; they also differ between packages
_PLATFORM = "platform"  # in the settings; another platform gives other bits, but the same numbers to float tolerance
_TYPES = "types"  # in the fingerprint of data; other types need other steps


class TrainingRun:
    """A running `fit`, which callbacks receive as a `SavePoint`. `SavePoint` documents the public members.

    Use it as a context manager: its end waits for pending writes.

    Args:
      core: the model.
      reader: the training batches.
      validation: the validation batches, by the names of the sets; "" for a set without a name.
      callbacks: all callbacks of the run.
      empty_logs: the running logs at the start of an epoch.
      epochs: the initial epoch, and the total number of epochs.
      timing: the clock of the run.
      limits: ends the run before its last epoch.

    Attributes:
      running_logs: the running logs of the epoch so far.
      logs: the logs of the last finished epoch.
      is_epoch_over: whether the epoch has no further batch, because the resumed run was stopped in it.
      is_over: whether there is no further epoch, because the run was stopped.

    If an exception comes between two save points, a checkpoint holds the last save point: its training state, unless a
    step has reused its memory, and the side effects of hooks before their later calls.
    """

    def __init__(self, core: ModelCore, reader: Reader, validation: Mapping[str, Reader], callbacks: CallbackList,
                 empty_logs: RunningLogs, epochs: tuple[int, int], timing: Timing, limits: RunLimits):
        self.kind = "start"
        self.epoch = epochs[0]
        self.logs: dict[str, Any] = {}
        self.batch = self.batches = 0
        self.running_logs = self._empty_logs = empty_logs
        self.is_epoch_over = self.is_over = self.is_at_limit = False
        self._limits = limits
        self._epochs = epochs
        self._is_restored = False
        self._core = core
        self._reader, self._validation = reader, validation
        self._callbacks = callbacks
        self._timing = timing
        self._resume_token: ResumeToken | None = None
        self._before_hooks: dict[str, Any] | None = None  # the `_snapshot` before hooks that a resumed run calls again
        self._state: TrainState | None = None  # at the last save point
        self._writer: CheckpointWriter | None = None
        self._folders: dict[str, CheckpointFolder] = {}  # locked for the duration of the run
        self._is_watched = callbacks.wants("on_save_point")
        # An error in a step, or in such a hook, would save the states of callbacks after hooks that are called again.
        self._keeps_snapshots = callbacks.save_on_error and (
            callbacks.wants("on_train_batch_begin") or callbacks.wants("on_batch_begin"))
        # Before training: the first batches of a generator cannot be inspected again.
        self._fingerprint = self._described_data() if self._is_watched else None
        self._digests = core.program_digests(reader.peek()) if self._is_watched else {}
        reader.keeps_resume_tokens = self._is_watched

    # --- calls of the loop -----------------------------------------------------------------------------------------

    @property
    def last_batch(self) -> int | None:
        """The index of the epoch's batch that no execution may go beyond; None without a limit."""
        return self._limits.last_batch(self.batches, self.batch)

    def begin_or_resume(self) -> None:
        """Lets callbacks restore a run, after their hooks for the start of training."""
        self._offer_save_point("start")
        if self.batches and self._limits.are_reached(self.batches, self._core.strategy, self._timing):
            self.is_at_limit = self.is_over = True

    def trained(self, batch: int, running: RunningLogs, resume_token: ResumeToken | None) -> None:
        """Called after `batch` batches of the epoch, the last of a group with this `resume_token`."""
        self.batches += batch - self.batch
        self.batch, self.running_logs, self._resume_token = batch, running, resume_token
        self._before_hooks = None
        self.is_at_limit = self._limits.are_reached(self.batches, self._core.strategy, self._timing)
        self._offer_save_point("batches")
        if self._keeps_snapshots:
            self._keep_snapshot()
        if self.is_at_limit:  # after saving, so that the saved run can continue
            self._core.set_stops("train", True)

    def epoch_trained(self) -> None:
        """Called after the epoch's training, before its validation and its end."""
        # Callbacks may count these hooks, and receive them again in a resumed run.
        self._keep_snapshot()

    def validated(self, batch: int, running: RunningLogs, resume_token: ResumeToken | None) -> None:
        """Called after some batches of the validation."""
        self._offer_save_point("validation")

    def epoch_ended(self, logs: Mapping[str, Any]) -> None:
        """Called after the callbacks' hooks for the end of the epoch, with its logs."""
        self.logs = dict(logs) if self._is_watched else {}
        self.epoch, self.batch, self.running_logs, self._resume_token = self.epoch + 1, 0, self._empty_logs, None
        self.is_epoch_over, self.is_over = False, self._core.stops("train")
        self._keep_snapshot()
        self._offer_save_point("epoch")

    def _offer_save_point(self, kind: str) -> None:
        self.kind = kind
        if self._is_watched:
            if kind != "start":  # at the start, it may be pending
                self._state = self._core.state.current
            with self._timing.callbacks:
                self._callbacks.on_save_point(self)

    def _keep_snapshot(self) -> None:
        self._before_hooks = self._snapshot() if self._is_watched else None

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, (Exception, KeyboardInterrupt)) and self._is_watched and jax.process_count() == 1:
            self._failed()
        self.kind = "closed"
        try:
            if self._writer is None or (error is not None and jax.process_count() > 1):
                return  # would wait for other processes, which may not come
            with self._timing.checkpoint:
                self._writer.close()
        except (OSError, ValueError) as failure:
            if error is None:
                raise
            warnings.warn(f"A checkpoint could not be written: {failure}", stacklevel=2)
        finally:
            for folder in self._folders.values():
                folder.release()

    def _failed(self) -> None:
        """Lets callbacks save; a failure must not hide the original exception."""
        self.kind = "error"
        try:
            self._callbacks.on_save_point(self)
        except Exception as failure:
            warnings.warn(f"The run could not be saved when it ended by an exception: {failure}", stacklevel=2)

    # --- SavePoint -------------------------------------------------------------------------------------------------

    def save(self, folder: str, keep: int, wait: bool = False) -> bool:
        if self._callbacks.flush():
            if wait:
                self.wait()
            return False
        with self._timing.checkpoint:
            held = self._acquired(folder)
            checkpoints = CheckpointFolder(folder, keep)
            if self._writer is None:
                self._writer = CheckpointWriter()

            def on_saved() -> None:
                held.check_is_held()  # before files that may belong to another run are deleted
                begun_run.forget(folder)
                checkpoints.prune()

            state = self._core.state.current if self.kind != "error" else self._state_of_last_point()
            arrays = tree_paths.named_leaves({"state": state, "logs": self.running_logs})
            document = self._before_hooks or self._snapshot()
            # After the last batch of an epoch, the run may already be saved, before the epoch's end.
            self._writer.save(checkpoints.path_of(self.batches), arrays, document, replace=True,
                              on_saved=on_saved)
            if wait:
                self._writer.wait()
        return True

    def restore(self, folder: str) -> str | None:
        with self._timing.checkpoint:
            path = self._acquired(folder).newest_whole()
            if path is None:
                if jax.process_index() == 0:
                    begun_run.begin(folder, self._callbacks)
                    if is_checkpoint(folder):
                        warnings.warn(f"{folder!r} is a model that `Model.save` wrote, and no run, so the training "
                                      "begins with the model's own weights. To train the saved model, load it: "
                                      f"`trainer.load_model({folder!r}, model=model)`.", stacklevel=user_stacklevel())
                return None
            checkpoint = open_checkpoint(path, verify=False)
        document = checkpoint.document
        check_is_of_run(path, document)
        with naming_file(path):
            self._check_arguments(path, document)
            has_same_data = self._has_same_data(path, document["fingerprint"])
        now = {"state": self._core.state.current, "logs": self._empty_logs}
        with self._timing.checkpoint:
            restored = tree_paths.with_leaves(now, self._restored(checkpoint, tree_paths.named_leaves(now)))
        if has_same_data:  # and arrays of the same shapes, without which each program differs
            with naming_file(path):
                self._compare_programs(path, document["settings"][_PROGRAMS])
        self._is_restored = True
        if document["batch"] > 0:
            # Before the states are restored: they contain the effects of the epoch's begin hook, which must count once.
            self._callbacks.on_epoch_begin(document["epoch"])
        self._core.state.set(restored["state"])
        self.running_logs, self.logs = restored["logs"], document["logs"]
        with naming_file(path):
            self._callbacks.load_state_dict(document["callbacks"])
        self.epoch, self.batch, self.batches = document["epoch"], document["batch"], document["batches"]
        self._core.set_stops("train", document["stop_training"])
        self.is_epoch_over = document["stop_training"] and self.batch > 0
        self.is_over = document["stop_training"] and self.batch == 0
        if self._has_no_epoch_left:
            epochs = f"{self.epoch} epoch{'s' * (self.epoch != 1)}"
            how = f"was stopped after {epochs}" if self.is_over else f"is complete, with {epochs}"
            return (f"The run of {path!r} {how}: there is nothing left to train. "
                    f"{'' if self.is_over else 'Give more `epochs` to go on, or '}"
                    f"{'Start' if self.is_over else 'start'} in another folder to begin again.")
        skipped = self._continue_data(path, document)
        return f"Resumed at epoch {self.epoch + 1}, batch {self.batch}, from {path!r}.{skipped}"

    def start_from(self, folder: str) -> None:
        with self._timing.checkpoint:
            path = self._acquired(folder).newest_whole()
            if path is None:
                raise ValueError(f"{folder!r} has no checkpoint to start from.")
            checkpoint = open_checkpoint(path, verify=False)
            check_is_of_run(path, checkpoint.document)
            self._core.state.set(restored_state(checkpoint, self._core.state.current))
        self.batches = checkpoint.document["batches"]

    def roll_back(self, folder: str) -> str | None:
        self.wait()
        with self._timing.checkpoint:
            path = self._acquired(folder).newest_whole()
            if path is None:
                return None
            checkpoint = open_checkpoint(path, verify=False)
            check_is_of_run(path, checkpoint.document)
            present = self._core.state.current
            # With the number of the step, by which random streams continue.
            self._core.state.set(restored_state(checkpoint, present).replace(step=present.step))
        return path

    def wait(self) -> None:
        if self._writer is not None:
            with self._timing.checkpoint:
                self._writer.wait()

    def delete(self, folder: str) -> None:
        self.wait()
        checkpoints = self._acquired(folder)
        if jax.process_index() == 0:
            begun_run.forget(folder)
        checkpoints.delete()
        del self._folders[folder]

    def is_preempted(self, boundary: int) -> bool:
        return reached_preemption_sync_point(boundary)

    def _acquired(self, folder: str) -> CheckpointFolder:
        if folder not in self._folders:
            checkpoints = CheckpointFolder(folder)
            checkpoints.acquire()
            self._folders[folder] = checkpoints
        return self._folders[folder]

    # --- the saved state -------------------------------------------------------------------------------------------

    def _state_of_last_point(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("it had just begun.")
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state) if isinstance(leaf, jax.Array)):
            raise RuntimeError(f"a step had run after batch {self.batch} of epoch {self.epoch + 1} of which not all "
                               "callbacks were told. The newest checkpoint is the last that was written before.")
        return self._state

    def _snapshot(self) -> dict[str, Any]:
        positions = {name: {"consumed": reader.consumed, **reader.position(0, reader.consumed)}
                     for name, reader in self._validation.items()}
        return {
            "kind": _KIND,
            "epoch": self.epoch,
            "batch": self.batch,
            "batches": self.batches,
            "logs": self.logs,
            "initial_epoch": self._epochs[0],
            "epochs": self._epochs[1],
            "settings": self._settings(),
            "stop_training": self._core.stops("train"),
            "data": self._reader.position(self.epoch, self.batch, self._resume_token),
            "validation": positions.pop("", None),
            "validation_sets": positions,
            "fingerprint": self._fingerprint,
            "callbacks": self._callbacks.state_dict(),
        }

    def _settings(self) -> dict[str, Any]:
        # The totals of all logs form a single array, so other logs could be mistaken for them.
        logs = {log.name: "mean" if log.metric is None else type(log.metric).__name__ for log in self._empty_logs.logs}
        return {**self._core.run_settings(), "logs": logs, "limit_batches": self._reader.limit_batches,
                _PROGRAMS: {**package_versions(), **self._digests},
                _PLATFORM: describe_platform(list(self._core.strategy.mesh.devices.flat))}

    def _check_arguments(self, path: str, saved: dict[str, Any]) -> None:
        if self._is_restored:
            raise ValueError("Two `BackupAndRestore` callbacks have a checkpoint of this run. Use one.")
        now, then = self._settings(), dict(saved["settings"])
        del then[_PROGRAMS]
        self._compare_platforms(path, then.pop(_PLATFORM), now[_PLATFORM])
        differ = [f"{brief(name)} (received {now.get(name)!r}, in the checkpoint {brief(repr(value))})"
                  for name, value in then.items() if now.get(name) != value]
        if saved["initial_epoch"] != self._epochs[0]:
            differ.append(f"initial_epoch (received {self._epochs[0]}, in the checkpoint {saved['initial_epoch']})")
        if differ:
            raise ValueError(f"The run that {path!r} is from differs in {', '.join(differ)}. Do as then, or start in "
                             f"another folder. {see('run-differs')}")
        if saved["epoch"] > self._epochs[1]:
            raise ValueError(f"The run that {path!r} is from has {saved['epoch']} epochs behind it. Received: "
                             f"epochs={self._epochs[1]}. Give at least as many, or start in another folder.")

    @staticmethod
    def _compare_platforms(path: str, then: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Warns if the resumed run was computed on other devices, or compiled by another compiler."""
        differ = [f"{brief(name)} (here {now.get(name)}, then {brief(value)})" for name, value in then.items()
                  if now.get(name) != value]
        if differ:
            warnings.warn(f"The run that {path!r} is from had another {' and another '.join(differ)}. It goes on, but "
                          "from here on it has the numbers of an undisturbed run to float tolerance, and not to the "
                          "bit.", stacklevel=2)

    def _compare_programs(self, path: str, then: Mapping[str, str]) -> None:
        """Warns of parts that have the same names as in the resumed run, but trace to other programs."""
        if any(then.get(name) != version for name, version in package_versions().items()):
            return  # other versions trace the same functions differently
        differ = [name for name, digest in self._digests.items() if then.get(name, digest) != digest]
        if differ:
            # Not an error: traces may also differ for equivalent computations, or by the order of a set.
            warnings.warn(f"The computation of {' and '.join(differ)} differs from the run that {path!r} is from: "
                          "another function, or other arguments. The run goes on with it, but a constant learning rate "
                          "is taken from the checkpoint. Start in another folder to begin again.", stacklevel=2)

    def _restored(self, checkpoint: Checkpoint, targets: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return checkpoint.restore(targets)
        except CheckpointError as error:
            logs = {name: (leaf.shape, leaf.dtype) for name, leaf in targets.items() if name.startswith("logs/")}
            same = all(checkpoint.specs.get(name) == spec for name, spec in logs.items())
            what = "model and its optimizer" if same else "loss and the metrics"
            raise CheckpointError(f"The {what} do not match the run. Make and compile the model as then, or start "
                                  f"in another folder. {error}") from None

    def _described_data(self) -> dict[str, Any]:
        return {"training data": self._reader.fingerprint(), _described_set(""): None,
                **{_described_set(name): reader.fingerprint() for name, reader in self._validation.items()}}

    def _has_same_data(self, path: str, saved: dict[str, Any]) -> bool:
        """Returns whether the data are the data of the run; raises if the run cannot continue with other data."""
        is_same = True
        readers = {"training data": self._reader,
                   **{_described_set(name): reader for name, reader in self._validation.items()}}
        for name in {**(self._fingerprint or {}), **saved}:
            reader = readers.get(name)
            now: dict[str, Any] | None = (self._fingerprint or {}).get(name)
            then: dict[str, Any] | None = saved.get(name)
            if now == then:
                continue
            if now is None or then is None:
                differ = f"there are {'none' if now is None else 'some'} now"
            else:
                differ = "they differ in " + ", ".join(
                    f"{brief(key)} (received {_shown(now.get(key))}, then {_shown(then.get(key))})"
                    for key in {**then, **now} if now.get(key) != then.get(key))
            message = (f"The {brief(name)} do not match the run that {path!r} is from: {differ}. Give the "
                       "same data, batch size, seed and number of workers, or start in another folder.")
            if reader is None or now is None or then is None or reader.is_exact or now.get(_TYPES) != then.get(_TYPES):
                raise ValueError(message)
            warnings.warn(f"{message} The run goes on, but not as it would have done.", stacklevel=2)
            is_same = False
        return is_same

    @property
    def _has_no_epoch_left(self) -> bool:
        return self.is_over or self.epoch >= self._epochs[1]

    def _continue_data(self, path: str, document: dict[str, Any]) -> str:
        begin = time.perf_counter()
        with naming_file(path):
            try:
                skipped = self._reader.resume(self.epoch, self.batch, document["data"])
                for name, reader in self._validation.items():
                    position = document["validation_sets"][name] if name else document["validation"]
                    if consumed := position["consumed"]:
                        skipped += reader.resume(0, consumed, position)
            except DataError as error:  # of the data, while the checkpoint is sound
                raise DataError(f"{error} The checkpoint: {path!r}.") from error.__cause__
        if not skipped:
            return ""
        return f" {skipped} batches were read and dropped to get there, in {time.perf_counter() - begin:.1f} s."


class RunLimits:
    """The `max_steps` and `max_time` of a `fit`.

    Args:
      max_steps: maximum number of batches to train on, above 0, including batches before an interruption; None for no
        limit.
      max_time: seconds, or a `datetime.timedelta`, from now until the execution after which the run ends; None for no
        limit.

    Attributes:
      are_given: whether there is a limit, so that the data may be endless.

    Raises:
      TypeError: if `max_time` is of a wrong type.
      ValueError: if `max_time` is not above 0.

    Example:

    >>> limits = RunLimits(max_steps=10)
    >>> limits.last_batch(trained=8, batch=3)
    4
    """

    def __init__(self, max_steps: int | None = None, max_time: float | datetime.timedelta | None = None):
        if isinstance(max_time, datetime.timedelta):
            max_time = max_time.total_seconds()
        if max_time is not None:
            arguments.require_positive(max_time=max_time)
        self.are_given = (max_steps, max_time) != (None, None)
        self._max_steps = max_steps
        self._max_secs = max_time
        self._begin = time.monotonic()

    def last_batch(self, trained: int, batch: int) -> int | None:
        """Returns the index of the run's last batch in the epoch, after `trained` batches; None without `max_steps`."""
        return None if self._max_steps is None else batch + self._max_steps - trained - 1

    def are_reached(self, trained: int, strategy: Strategy, timing: Timing) -> bool:
        """Returns whether the run ends after `trained` batches; all processes must call it, and return the same."""
        if self._max_steps is not None and trained >= self._max_steps:
            return True
        if self._max_secs is None:
            return False
        is_over = time.monotonic() - self._begin >= self._max_secs
        if not strategy.spans_processes:
            return is_over
        with timing.agreement():
            return strategy.process_group.any(is_over)

    def describe(self) -> dict[str, Any]:
        """Returns the limits as plain data, which must be equal in all processes."""
        return {"max_steps": self._max_steps, "max_time": self._max_secs}


def check_is_of_run(path: str, document: object) -> None:
    """Raises ValueError unless the document of the checkpoint at `path` belongs to a run."""
    if not isinstance(document, Mapping) or document.get("kind") != _KIND:
        raise ValueError(f"{path!r} is no checkpoint of a run. `trainer.load` reads what `Model.save` wrote.")
    missing = [name for name in _KEYS if name not in document]
    if missing:
        raise ValueError(f"The checkpoint {path!r} is malformed: it lacks {', '.join(missing)}. Delete it.")
    for name, kind in _KEYS.items():
        value = document[name]
        if not isinstance(value, kind) or (isinstance(value, int) and kind is int and (
                isinstance(value, bool) or value < 0)):
            raise ValueError(f"The checkpoint {path!r} is malformed: its {name} is {brief(repr(value))}. Delete it.")


def is_at_the_end(document: Mapping[str, Any]) -> bool:
    """Returns whether a run's document was saved after its last epoch."""
    if document["batch"] > 0:
        return False
    return document["stop_training"] or document["epoch"] >= document["epochs"]


def restored_state(checkpoint: Checkpoint, state: TrainState) -> TrainState:
    """Returns the training state of a run's checkpoint, without the rest of the run.

    Args:
      state: a training state of the same model, compiled in the same way, with the placement for the result.

    Raises:
      ValueError: if the checkpoint is of another model or optimizer; the message lists the arrays that differ.
    """
    targets = tree_paths.named_leaves({"state": state})
    targets.update({name: target for name, target in checkpoint.targets_here().items()
                    if name.split(tree_paths.SEPARATOR)[0] == "logs"})
    try:
        leaves = checkpoint.restore(targets)
    except CheckpointError as error:
        raise ValueError("The model and its optimizer do not match the run. Make and compile the model as there, "
                         "or begin a run in another folder. "
                         f"{error}") from None
    return tree_paths.with_leaves({"state": state}, leaves)["state"]


def _described_set(name: str) -> str:
    return f"validation data {name!r}" if name else "validation data"


def _shown(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:60]}..."
