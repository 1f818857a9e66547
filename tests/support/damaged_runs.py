"""A training that is interrupted, whose checkpoints are damaged, and that is started again: the allowed outcomes.

Owns the training and the verdict. The damage is in `corruptions.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trainer
from tests.support import corruptions
from tests.support.networks import LinenMLP, classification, logits_loss
from tests.support.waiting import GUARD_SECS
from trainer import callbacks as cb
from trainer.callbacks.record.run_record import FILE_NAME as RECORD_NAME
from trainer.engine.saving.checkpoint import CheckpointError, check_manifest
from trainer.engine.saving.checkpoint.manifest import FILE_NAME as MANIFEST

X, Y, _ = classification(52)
BATCH_SIZE, BATCHES, EPOCHS = 8, 7, 3  # the last batch of an epoch has 4 rows
NEWEST, OLDER = "step_12", "step_10"  # that the interruption leaves
SAME, REFUSED, WRONG = "same numbers", "clear error", "wrong"

Figures = dict[str, np.ndarray]


class Interruption(Exception):
    """Instead of a kill: nothing of the run goes on after it."""


class Hung(BaseException):
    """A run took too long. Not an Exception, so that nothing takes it for an error that it can handle."""


class Interrupt(cb.Callback):
    """Raises after the training batch `last`, counted over the epochs; counts the trained batches.

    With its state the document of a checkpoint is longer than any file that can be written where "long files fail".
    """

    state_attributes = ("notes",)

    def __init__(self, last: int | None = None):
        self.last, self.count, self.notes = last, 0, bytes(20_000)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.count == self.last:
            raise Interruption


class Training:
    """A training that is done once without an interruption, and then goes on from checkpoints again and again.

    One model goes on each time, so that nothing is compiled anew. Before, each array of its state is overwritten.

    Attributes:
      model: the model that goes on.
      expected: all numbers of the undisturbed run.
    """

    def __init__(self) -> None:
        self.expected, _ = self._run(_new_model())
        self.model = _new_model()

    def interrupt(self, folder: pathlib.Path) -> None:
        """Leaves the two checkpoints in a folder."""
        with contextlib.suppress(Interruption):
            self._run(self.model, cb.BackupAndRestore(folder, save_freq=2), last=13)

    def resume(self, folder: pathlib.Path, save_freq: Any) -> tuple[Figures, int]:
        """Returns all numbers at the end of the run that goes on from a folder, and how many batches it trained on."""
        self.overwrite()
        return self._run(self.model, cb.BackupAndRestore(folder, save_freq))

    def overwrite(self) -> None:
        """Changes each array of the model's state."""
        self.model.state = jax.tree.map(
            lambda leaf: jnp.full_like(leaf, 0.25 if jnp.issubdtype(leaf.dtype, jnp.floating) else 77),
            self.model.state)

    def _run(self, model: Any, *callbacks: Any, last: int | None = None) -> tuple[Figures, int]:
        plateau = cb.ReduceLROnPlateau("val_loss", patience=0, min_delta=1.0)
        stopping = cb.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
        counter = Interrupt(last)
        history = model.fit(X, Y, BATCH_SIZE, EPOCHS, validation_data=(X[:20], Y[:20]), verbose=0,
                            callbacks=[*callbacks, plateau, stopping, counter])
        figures = {f"state {number}": leaf for number, leaf in enumerate(jax.tree.leaves(model.state))}
        figures |= {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
        figures |= {f"best weight {number}": weight for number, weight in enumerate(stopping.best_weights)}
        figures |= {f"history {name}": values for name, values in history.history.items()}
        figures |= {"epochs": history.epoch, "learning rate": model.optimizer.learning_rate,
                    "callbacks": [plateau.best, plateau.wait, stopping.best, stopping.wait, stopping.best_epoch]}
        return {name: np.array(value) for name, value in figures.items()}, counter.count


def _new_model() -> trainer.Model:
    with trainer.distribute.OneDeviceStrategy().scope():
        model = trainer.Model(LinenMLP(batch_norm=True, dropout=0.2), seed=3)
        model.compile(trainer.optimizers.Adam(0.02), logits_loss(), metrics=["accuracy"])
    return model


def differences(figures: Figures, expected: Figures) -> list[str]:
    """Returns the names of the figures that are not the same to the bit."""
    return [name for name in expected.keys() | figures.keys()
            if name not in figures or name not in expected
            or (figures[name].dtype, figures[name].shape, figures[name].tobytes())
            != (expected[name].dtype, expected[name].shape, expected[name].tobytes())]


# --- the disks --------------------------------------------------------------------------------------------------------

NO_TROUBLE = "none"
TROUBLES: dict[str, Callable[[pathlib.Path, random.Random], Any]] = {
    NO_TROUBLE: lambda folder, rng: contextlib.nullcontext(folder),
    "read-only folder": lambda folder, rng: corruptions.read_only(folder),
    "long files fail": lambda folder, rng: corruptions.without_long_files(folder, rng.randrange(10_000, 20_000)),
    "short files fail too": lambda folder, rng: corruptions.without_long_files(folder, rng.randrange(150, 4000)),
    "full disk": lambda folder, rng: corruptions.on_a_small_disk(folder, rng.randrange(4096, 200_000)),
}


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a corruption.

    Attributes:
      where: which checkpoints were damaged.
      kind: `SAME`, `REFUSED` or `WRONG`.
      text: the error's message, or a description of the mistake.
    """

    where: str
    kind: str
    text: str = ""


class Wrong(Exception):
    """A run has done something forbidden."""


def judged(training: Training, saved: pathlib.Path, kind: str, trouble: str, rng: random.Random) -> Verdict:
    """Damages a copy of the two checkpoints in a folder, resumes from it, and judges the outcome.

    Args:
      training: the training that left the checkpoints.
      saved: the folder with them, which stays as it is.
      kind: element of `corruptions.KINDS`.
      trouble: element of `TROUBLES`, which the resumed run has with its disk.
      rng: decides the rest.
    """
    with tempfile.TemporaryDirectory() as parent:
        pathlib.Path(parent).chmod(0o755)  # for the user who may not write
        folder = pathlib.Path(parent, "backup")
        shutil.copytree(saved, folder)
        where = corruptions.damage(kind, rng, folder / NEWEST, folder / OLDER)
        threads = set(threading.enumerate())
        try:
            message = _checked(training, folder, Damage.of(folder, saved), trouble, rng)
            _check_threads(threads)
        except Wrong as wrong:
            return Verdict(where, WRONG, str(wrong))
        return Verdict(where, REFUSED if message else SAME, message)


@dataclasses.dataclass(frozen=True)
class Damage:
    """The damage to two checkpoints, from a comparison with their originals.

    Attributes:
      trained: number of batches that remain for a run from the newest whole checkpoint; None if no checkpoint is whole.
      to_name: the damaged checkpoints that are newer, each with its changed files.
      damaged: the names of all damaged checkpoints.
    """

    trained: int | None
    to_name: dict[str, set[str]]
    damaged: set[str]

    @classmethod
    def of(cls, folder: pathlib.Path, saved: pathlib.Path) -> Damage:
        """Compares two folders."""
        originals = {name: corruptions.contents_of(saved / name) for name in (NEWEST, OLDER)}
        trained, to_name, damaged = None, {}, set()
        for name in originals:
            present = corruptions.contents_of(folder / name)
            # A whole checkpoint under the other's name is whole: it knows itself where it stands.
            whole = [original for original, content in originals.items() if present == content]
            if whole and trained is None:
                trained = BATCHES * EPOCHS - int(whole[0].removeprefix("step_"))
            if not whole and (folder / name).exists():
                damaged.add(name)
                if trained is None:
                    # A checkpoint with the manifest of the other checkpoint is compared with that original.
                    meant = [content for content in originals.values()
                             if content[MANIFEST] == present.get(MANIFEST)] or [originals[name]]
                    to_name[name] = corruptions.differing(present, meant[0])
        return cls(trained, to_name, damaged)


def _checked(training: Training, folder: pathlib.Path, damage: Damage, trouble: str, rng: random.Random) -> str:
    """Resumes; returns the message of a clear error, or nothing if the run ended with the expected numbers."""
    before, save_freq = corruptions.contents_of(folder), rng.choice((3, 4, "epoch"))
    with TROUBLES[trouble](folder, rng) as place:
        error, said = _attempt(training, place, save_freq, damage.trained)
    may_not_save = isinstance(error, (OSError, CheckpointError)) and str(place) in str(error) and trouble != NO_TROUBLE
    if damage.trained is None:
        again, _ = _attempt(training, folder, save_freq, None)
        if not _none_is_whole(again) or not (_none_is_whole(error) or may_not_save):
            raise Wrong(f"no checkpoint is whole, but there was {error!r}, and then {again!r}")
        _check_named(damage.to_name, f"{error}\n{again}")
        present = corruptions.contents_of(folder).items()
        if {name.removeprefix("corrupt_"): content for name, content in present} != before:
            raise Wrong("no checkpoint is whole, and files were changed or deleted")
        return str(error)
    if error is None:
        _check_named(damage.to_name, said)
        return ""
    if not may_not_save:
        raise Wrong(f"a checkpoint is whole, but there was {error!r}")
    _check_left(folder, damage.damaged)
    later, said_later = _attempt(training, folder, save_freq, None)
    if later is not None:
        raise Wrong(f"after {error!r}, with a good disk, there was {later!r}")
    _check_named(damage.to_name, f"{said}\n{said_later}")  # a disk may be refused before checkpoints are looked at
    return str(error)


def _none_is_whole(error: Exception | None) -> bool:
    return isinstance(error, CheckpointError) and "No checkpoint in" in str(error)


def _attempt(training: Training, folder: pathlib.Path, save_freq: Any,
             trained: int | None) -> tuple[Exception | None, str]:
    """Resumes; returns the exception and the warnings.

    Raises:
      Wrong: if the run ends with other numbers than expected, or took up the training elsewhere, or hangs.
    """
    with warnings.catch_warnings(record=True) as caught, _limited():
        warnings.simplefilter("always")
        try:
            figures, count = training.resume(folder, save_freq)
        except Exception as error:
            return error, _text_of(caught)
        except Hung:
            raise Wrong(f"it took more than {GUARD_SECS} s") from None
    said = _text_of(caught)
    if different := differences(figures, training.expected):
        raise Wrong(f"other numbers, after {count} batches: {', '.join(sorted(different))}. Warnings: {said or 'none'}")
    if trained is not None and count != trained:
        raise Wrong(f"it went on with the last {count} batches instead of {trained}")
    if unexpected := [str(warning.message) for warning in caught
                      # Not warnings of other code, such as asyncio's about writes that a full disk has interrupted.
                      if warning.category is UserWarning and "is damaged" not in str(warning.message)]:
        raise Wrong(f"it warns without need: {unexpected[0]}")
    return None, said


def _text_of(caught: list[Any]) -> str:
    return "\n".join(str(warning.message) for warning in caught)


def _check_named(damaged: dict[str, set[str]], text: str) -> None:
    for name, files in damaged.items():
        if not any(f"{name}' is damaged: its file {file!r}" in text for file in files):
            raise Wrong(f"nothing names {name} with one of {sorted(files)}: {text or 'no warning'}")


def _check_left(folder: pathlib.Path, damaged: set[str]) -> None:
    """Checks that a failed save has left whole checkpoints, and nothing of its own."""
    whole = 0
    for path in folder.iterdir():
        if path.name == RECORD_NAME:
            continue
        try:
            check_manifest(path)
            whole += 1
        except CheckpointError as error:
            if path.name.removeprefix("corrupt_") not in damaged:
                raise Wrong(f"the failed save has left this: {error}") from error
    if not whole:
        raise Wrong("the failed save has left no whole checkpoint")


def _check_threads(before: set[threading.Thread]) -> None:
    """Checks that no new thread goes on that would keep a process from its end."""
    deadline = time.monotonic() + GUARD_SECS
    while left := [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]:
        if time.monotonic() > deadline:
            raise Wrong(f"threads go on: {left}")
        time.sleep(0.01)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise Hung

    outer = signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(GUARD_SECS))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, outer)
