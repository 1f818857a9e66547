"""SidecarEvaluator: evaluates the checkpoints of a `fit` that runs in other processes.

Owns the choice of the evaluated checkpoint, and the detection of the end of the training. It only reads the training's
folder. The content of a run's checkpoint is defined in `engine/loop/resumable_run.py`, its files in
`engine/saving/checkpoint/`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from typing import Any

import jax

from trainer.callbacks import CallbackList
from trainer.callbacks.progress.progress_text import log_texts
from trainer.core import arguments, errors
from trainer.core.train_state import TrainState
from trainer.core.types import Data
from trainer.data.adapt import adapt
from trainer.data.reader import Reader
from trainer.data.sources.arrays import is_array_tree, is_list_of_batches
from trainer.data.sources.sources import Source
from trainer.engine.loop import loop
from trainer.engine.loop.resumable_run import check_is_of_run, is_at_the_end, restored_state
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.inputs import sets_of
from trainer.engine.model.model import Model
from trainer.engine.model.types import Callbacks
from trainer.engine.saving.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    NewerFormatError,
    is_checkpoint,
    open_checkpoint,
)
from trainer.engine.saving.checkpoint.manifest import FILE_NAME as MANIFEST

# Also matches checkpoints that are being written, replaced or deleted, and damaged checkpoints.
_OF_CHECKPOINTS = re.compile(r"(corrupt_|\.)?step_[0-9]+(_|\.|$)")
_MAX_NAMES = 5  # of the content of a folder, in a message

_Identity = tuple[int, ...]


class SidecarEvaluator:
    """Evaluates the checkpoints of a training, in a separate process alongside.

    It follows the folder of the training's `BackupAndRestore`. It always evaluates the newest checkpoint, and each
    checkpoint at most once. Checkpoints that come and go during an evaluation are skipped, and damaged checkpoints are
    skipped with a warning. The folder is not changed. The weights are the weights that `evaluate` in the training would
    use: with `compile(ema_decay=...)`, their moving average.

    It ends after the final checkpoint of the training, or when the training has deleted its checkpoints, or after
    `max_evaluations`. It waits for a training that was preempted or has crashed. To make sure that the last state is
    evaluated even if evaluations are slow, give the training `BackupAndRestore(..., delete_checkpoint=False)`.

    The process must not be part of the training job, and computes on its own devices. As with TensorFlow, TF_CONFIG can
    give a process this role: with the training's cluster and the task `{"type": "evaluator", "index": 0}`,
    `TFConfigClusterResolver().task_type` is "evaluator".

    Args:
      model: a model that is made and compiled as in the training. Its strategy may differ. Its training state becomes
        the state of the last checkpoint.
      data: the evaluation data, read from the start each time: `(x, y)` or `(x, y, sample_weight)` of arrays, a batched
        `trainer.data.Dataset`, or another iterable of batches that can be read more than once; or a dict of such sets
        by name, as `validation_data` of `fit`.
      checkpoint_dir: the folder of the training's `BackupAndRestore`. It need not exist yet.
      steps: maximum number of batches per evaluation; by default all.
      max_evaluations: number of evaluations after which to end; None for no limit. TensorFlow instead counts
        checkpoints, including skipped checkpoints.
      callbacks: callbacks, or a list of callbacks, for each `evaluate`. At `on_test_end`, the model's
        `optimizer.iterations` is the step of the checkpoint, which `TensorBoard` uses for
        `evaluation_loss_vs_iterations` and so on. Hooks of `fit`, which `CSVLogger` and `EarlyStopping` use, are not
        called.
      poll_secs: seconds between two looks at the folder.
      timeout_secs: seconds to wait for a new checkpoint; None waits forever.
      verbose: 0 prints nothing, 1 a line per evaluation.

    Attributes:
      history: a dict per evaluation, in order: "step", the number of trained batches, "epoch", the number of finished
        epochs, and the logs of `evaluate` by name.
      has_evaluated_end: whether the final state of the training was evaluated.

    Raises:
      TypeError: for arguments of a wrong type.
      ValueError: for invalid values.
      RuntimeError: if the model is not compiled, or the process computes together with others.

    Example:
      >>> import numpy as np, trainer
      >>> from flax import linen as nn
      >>> def new_model():
      ...     model = trainer.Sequential([nn.Dense(1)])
      ...     model.compile("sgd", "mse")
      ...     return model
      >>> x, y = np.ones((8, 2)), np.ones((8, 1))
      >>> backup = trainer.callbacks.BackupAndRestore("backup", delete_checkpoint=False)
      >>> history = new_model().fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[backup])
      >>> evaluations = SidecarEvaluator(new_model(), (x, y), "backup", verbose=0).start()  # in another process
      >>> [(evaluation["step"], evaluation["epoch"]) for evaluation in evaluations]
      [(6, 3)]

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/experimental/SidecarEvaluator
    """

    def __init__(
        self,
        model: Model,
        data: Data,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Callbacks | None = None,
        *,
        poll_secs: float = 1.0,
        timeout_secs: float | None = None,
        verbose: int | str = 1,
    ):
        if not isinstance(model, Model):
            raise errors.wrong_type("model", model, "a `trainer.Model`, made and compiled as in the training")
        checkpoint_dir = arguments.as_path("checkpoint_dir", checkpoint_dir,
                                           "the path of the folder that the training's `BackupAndRestore` has")
        arguments.check_counts(1, optional=True, steps=steps, max_evaluations=max_evaluations)
        seconds = {"poll_secs": poll_secs} | ({} if timeout_secs is None else {"timeout_secs": timeout_secs})
        arguments.require(seconds, "a number of seconds above 0", lambda secs: secs > 0)
        CallbackList(callbacks)  # rejects invalid callbacks
        if model.optimizer is None:
            raise RuntimeError("Call `compile` before `SidecarEvaluator`, with the same arguments as in the training.")
        if jax.process_count() > 1:
            raise RuntimeError("`SidecarEvaluator` needs a process of its own, but this one is one of "
                               f"{jax.process_count()} that compute together. Start another process for it, which "
                               "makes no strategy for several processes.")
        self.model = model
        self.data = data
        self.checkpoint_dir = os.path.abspath(checkpoint_dir)
        self.steps = steps
        self.max_evaluations = max_evaluations
        self.callbacks = callbacks
        self.poll_secs = poll_secs
        self.timeout_secs = timeout_secs
        self.verbose = arguments.check_verbose(verbose)
        self.history: list[dict[str, Any]] = []
        self.has_evaluated_end = False
        self._sources_of_data()

    def start(self) -> list[dict[str, Any]]:
        """Evaluates checkpoints until the training has ended. Compiles while waiting for the first checkpoint.

        Returns:
          `history`, which every call clears first.

        Raises:
          TimeoutError: if no new checkpoint came within `timeout_secs`.
          ValueError: if a checkpoint is of another model or not of a run of `fit`, `checkpoint_dir` is itself a
            checkpoint, or `evaluate` cannot take the data.
          NotADirectoryError: if `checkpoint_dir` is a file.
          NewerFormatError: if a newer version of the trainer has written a checkpoint.
        """
        self.history, self.has_evaluated_end = [], False
        folder = _FollowedFolder(self.checkpoint_dir)
        for source in self._sources_of_data():
            with Reader(source, self.steps) as reader:  # also builds the model
                loop.compile_ahead(core_of(self.model), "test", reader, passes=1, is_sample=False)
        waits_since = time.monotonic()
        while self.max_evaluations is None or len(self.history) < self.max_evaluations:
            found = folder.read_newest(core_of(self.model).state.current)
            if found is not None:
                document, state = found
                if state is not None:
                    self._evaluate(document, state)
                if is_at_the_end(document):
                    self.has_evaluated_end = True
                    break
                waits_since = time.monotonic()
            elif folder.has_ended():
                self._print(f"The training has ended and deleted its checkpoints before its last state was evaluated; "
                            f"{self._last_text()}. With `BackupAndRestore(delete_checkpoint=False)` it stays.")
                break
            elif self.timeout_secs is not None and time.monotonic() - waits_since > self.timeout_secs:
                raise TimeoutError(f"No new checkpoint came in {self.timeout_secs:g} s: {folder.description()}, "
                                   f"{self._last_text()}. Give the folder of the training's `BackupAndRestore`, see "
                                   "whether the training runs, or wait longer with `timeout_secs`.")
            else:
                time.sleep(self.poll_secs)
        return self.history

    def _evaluate(self, document: dict[str, Any], state: TrainState) -> None:
        here, there = core_of(self.model).run_settings()["precision"], document["settings"]["precision"]
        if here != there:
            raise ValueError("The model computes with another precision than the run. Received: "
                             f"{here}, in the checkpoint: {there}. Compile it with the same `precision`.")
        core_of(self.model).state.load(state)
        x, y, sample_weight = self._parts_of(self.data)
        logs = self.model.evaluate(x, y, sample_weight=sample_weight, steps=self.steps, verbose=0,
                                   callbacks=self.callbacks)
        place = {"step": document["batches"], "epoch": document["epoch"]}
        self.history.append({**place, **{name: value for name, value in logs.items() if name not in place}})
        self._print(f"step {place['step']}, {place['epoch']} of {document['epochs']} epochs - "
                    + " - ".join(log_texts(logs)))

    @staticmethod
    def _parts_of(data: Any) -> tuple[Any, Any, Any]:
        is_parts = isinstance(data, (tuple, list)) and not is_list_of_batches(data)
        if not is_parts or not data or not is_array_tree(data[0]):
            return data, None, None
        if len(data) > 3:
            raise ValueError("`data` must be `(x, y)`, `(x, y, sample_weight)` or an iterable of batches. Received: "
                             f"{errors.describe(data)}.")
        x, y, sample_weight = (*data, None, None)[:3]
        return x, y, sample_weight

    def _sources_of_data(self) -> list[Source]:
        sources = [adapt(*self._parts_of(data), steps=self.steps, processes=self.model.strategy.processes)
                   for data in sets_of("data", self.data).values()]
        if any(source.is_one_shot for source in sources):
            raise ValueError("`data` must be data that can be read again for each checkpoint. Received: a generator or "
                             "another iterator. Pass arrays, a `trainer.data.Dataset`, or an object whose `__iter__` "
                             "starts again.")
        return sources

    def _last_text(self) -> str:
        if not self.history:
            return "nothing was evaluated"
        return f"the last evaluation was of step {self.history[-1]['step']}"

    def _print(self, line: str) -> None:
        if self.verbose:
            print(line, flush=True)


class _FollowedFolder:
    """The folder of a run's checkpoints, which is only read, and never locked."""

    def __init__(self, path: str):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise NotADirectoryError(f"`checkpoint_dir` must be a folder. Received: {path!r}, which is a file.")
        if is_checkpoint(path):
            raise ValueError(f"{path!r} is itself a checkpoint. Give the folder that the training's `BackupAndRestore` "
                             "has, which holds its checkpoints `step_<number>`.")
        self._checkpoints = CheckpointFolder(path)
        self._step = -1  # read last
        self._looked_at: dict[int, _Identity] = {}
        self._has_had_some = False
        self._is_gone = False

    def read_newest(self, state: TrainState) -> tuple[dict[str, Any], TrainState | None] | None:
        """Returns the document and the training state of the newest complete checkpoint that was not returned before.

        A checkpoint that was saved again, as happens when the epoch ends after it, has only the document.

        Args:
          state: a training state with the shapes and the placement for the result.
        """
        for step in reversed(self._steps()):
            if step < self._step:
                break
            path = self._checkpoints.path_of(step)
            identity = _identity(path)
            if identity is None or identity == self._looked_at.get(step):
                continue
            try:
                checkpoint = open_checkpoint(path)
                check_is_of_run(path, checkpoint.document)
                read = restored_state(checkpoint, state) if step > self._step else None
            except Exception as error:
                if identity != _identity(path):
                    continue  # it was deleted or replaced in the meantime
                if not isinstance(error, CheckpointError) or isinstance(error, NewerFormatError):
                    raise
                self._looked_at[step] = identity
                warnings.warn(f"{error} It is not evaluated.", UserWarning, stacklevel=3)
                continue
            # A checkpoint loses its name before its files, so a checkpoint that still has its name was read completely.
            if identity != _identity(path):
                continue
            self._step = step
            self._looked_at = {step: identity, **{newer: at for newer, at in self._looked_at.items() if newer > step}}
            return checkpoint.document, read
        return None

    def has_ended(self) -> bool:
        """Returns whether all traces of former checkpoints were gone at two looks in a row."""
        # A single look may miss a folder that is being renamed.
        was_gone, self._is_gone = self._is_gone, not any(map(_OF_CHECKPOINTS.match, self._names()))
        return self._has_had_some and was_gone and self._is_gone

    def description(self) -> str:
        """Returns the content of the folder, for an error message."""
        path = self._checkpoints.path
        names = self._names()
        if self._steps():
            return f"the newest in {path!r} is 'step_{self._steps()[-1]}'"
        if names:
            more = ", ..." if len(names) > _MAX_NAMES else ""
            return f"{path!r} has no checkpoint of a run, but {', '.join(map(repr, names[:_MAX_NAMES]))}{more}"
        return f"the folder {path!r} {'is empty' if os.path.isdir(path) else 'does not exist'}"

    def _steps(self) -> list[int]:
        steps: list[int] = []
        with contextlib.suppress(FileNotFoundError):  # the folder is being deleted
            steps = self._checkpoints.steps()
        self._has_had_some = self._has_had_some or bool(steps)
        return steps

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._checkpoints.path))
        except FileNotFoundError:
            return []


def _identity(path: str) -> _Identity | None:
    """Returns an identity that differs between checkpoints of the same name; None without a checkpoint."""
    try:
        status = os.stat(os.path.join(path, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
