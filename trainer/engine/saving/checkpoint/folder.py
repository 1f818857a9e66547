"""A folder of checkpoints, one per step: which exist, which to resume from, and which to delete.

Owns their names, and the treatment of damaged checkpoints. Knows nothing of their content.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings

import jax

from trainer.core.errors import see
from trainer.core.files import storage
from trainer.engine.saving.checkpoint import disk, object_store, processes
from trainer.engine.saving.checkpoint.manifest import CheckpointError, NewerFormatError, check_manifest, is_checkpoint
from trainer.engine.saving.checkpoint.run_lock import RunLease, RunLock

_CHECKPOINT = re.compile(r"step_(0|[1-9][0-9]*)")
_ASIDE = re.compile(r"corrupt_step_[0-9]+(_[0-9]+)?")


class CheckpointFolder:
    """The checkpoints `step_<number>` in a folder, which need not exist yet.

    With several processes, all processes call `acquire` and `newest_whole`. Only process 0 deletes, and holds the lock.

    Args:
      path: path of the folder, or its URL in an object store. Other content is left alone.
      keep: number of checkpoints that `prune` keeps, 1 or more.

    Raises:
      ValueError: if `keep` is less than 1.

    >>> from trainer.engine.saving.checkpoint import CheckpointWriter
    >>> folder = CheckpointFolder("run", keep=1)
    >>> with CheckpointWriter() as writer:
    ...     for step in (10, 20):
    ...         writer.save(folder.path_of(step), {}, {"step": step}, on_saved=folder.prune)
    >>> folder.steps(), os.path.relpath(folder.newest_whole())
    ([20], 'run/step_20')
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2):
        if keep < 1:
            raise ValueError(f"`keep` must be 1 or more: the checkpoint just saved is never deleted. Received: {keep}.")
        self.path = storage.absolute(path)
        self._keep = keep
        self._lock: RunLock | RunLease | None = None

    def path_of(self, step: int) -> str:
        """Returns the path of the checkpoint of a step, 0 or more."""
        return os.path.join(self.path, f"step_{step}")

    def steps(self) -> list[int]:
        """Returns the steps with a checkpoint that looks complete, ascending. Its files are not checked."""
        return [step for step in self._numbered() if is_checkpoint(self.path_of(step))]

    def newest_whole(self) -> str | None:
        """Returns the newest checkpoint whose files are unchanged since they were written; None if there is none yet.

        A damaged checkpoint is renamed to `corrupt_step_<number>` with a warning, so that it is not used again; in a
        read-only folder it is only skipped. Nothing is deleted. In an object store a save that was killed leaves files
        without a manifest, which are not a checkpoint.

        Returns:
          The path of the checkpoint.

        Raises:
          CheckpointError: if there are checkpoints, renamed checkpoints included, but none is complete.
          NewerFormatError: if a newer version of the trainer has written the newest checkpoint.
          PermissionError: if a file is not readable.
        """
        return processes.from_first(lambda: self._newest_whole() or "") or None

    def prune(self) -> None:
        """Deletes the oldest checkpoints beyond `keep`.

        Raises:
          OSError: if a checkpoint cannot be deleted.
        """
        if jax.process_index() == 0:
            for step in self.steps()[:-self._keep]:
                self._discard(step)

    def check_is_held(self) -> None:
        """Raises CheckpointError if another run has taken a folder of an object store from this run."""
        if isinstance(self._lock, RunLease) and jax.process_index() == 0:
            self._lock.check()

    def acquire(self) -> None:
        """Takes the folder for the saves of this run: creates it if missing, and removes leftovers of killed saves.

        The folder belongs to this run until `release`, in an object store until another run acquires it. A checkpoint
        whose replacement was killed gets its name back.

        Raises:
          OSError: if the folder cannot be created or written, on process 0; CheckpointError on the others.
          CheckpointError: if another run holds the folder.
        """
        processes.from_first(self._acquire)

    def release(self) -> None:
        """Lets other runs acquire the folder. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _acquire(self) -> str:
        if storage.is_remote(self.path):
            self._lock = self._lock or RunLease(self.path)
            self._remove_leftovers()
            return self.path
        try:
            if self._lock is None:  # first: without the lock, another run may remove the folder at any time
                self._lock = RunLock(self.path)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            self.release()
            raise type(error)(error.errno, f"Checkpoints cannot be written to the folder ({error.strerror}). Give a "
                              "folder that can be made and written", self.path) from error
        self._remove_leftovers()
        return self.path

    def _remove_leftovers(self) -> None:
        if storage.is_remote(self.path):
            for step in self._steps_of_names():
                with contextlib.suppress(CheckpointError):  # it is damaged, and kept
                    object_store.remove_leftovers(self.path_of(step))
            return
        for name in storage.folder_names(self.path):
            for is_old, found in ((False, disk.name_of_temporary(name)), (True, disk.name_of_old(name))):
                if found is None or not _CHECKPOINT.fullmatch(found):
                    continue
                path, place = os.path.join(self.path, name), os.path.join(self.path, found)
                if is_old and not os.path.lexists(place):
                    os.rename(path, place)
                else:
                    disk.remove(path)

    def delete(self) -> None:
        """Deletes all checkpoints, including damaged checkpoints and leftovers, and the folder if it is then empty.

        An undeletable folder, such as a mount point, stays, and so does the working folder.

        Raises:
          OSError: if a checkpoint cannot be deleted.
        """
        if jax.process_index() != 0:
            return
        for step in self._steps_of_names():
            self._discard(step)
        for name in self._asides():
            disk.remove(os.path.join(self.path, name))
        self._remove_leftovers()
        self.release()
        if storage.is_remote(self.path):
            return  # where a folder is only a name
        with contextlib.suppress(OSError):  # it is not empty, or another run has removed it
            if not os.path.samefile(self.path, os.curdir):
                os.rmdir(self.path)

    def _newest_whole(self) -> str | None:
        steps = self._numbered()[::-1]
        found = bool(steps or self._has_asides())
        damages: list[str] = []
        for step in steps:
            path = self.path_of(step)
            try:
                check_manifest(path)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                damages.append(f"{error} {self._put_aside(step)}")
                continue
            for damage in damages:
                warnings.warn(f"{damage} Taking {path!r} instead.", UserWarning, stacklevel=4)
            return path
        if found:
            raise CheckpointError("\n".join([f"No checkpoint in {self.path!r} is whole. To start over, move the folder "
                                             f"away or delete it. {see('no-whole-checkpoint')}", *damages]))
        return None

    def _put_aside(self, step: int) -> str:
        """Renames a damaged checkpoint so that it is not used again; returns a description of the result."""
        if storage.is_remote(self.path):
            object_store.put_aside(self.path_of(step))
            return "It is left there without its manifest."
        name = aside = f"corrupt_step_{step}"
        number = 1
        while os.path.lexists(os.path.join(self.path, aside)):
            number += 1
            aside = f"{name}_{number}"
        try:
            os.rename(self.path_of(step), os.path.join(self.path, aside))
        except OSError as error:
            return f"It is skipped, and left where it is ({error.strerror})."
        return f"It is renamed to {aside!r}."

    def _discard(self, step: int) -> None:
        (object_store.remove if storage.is_remote(self.path) else disk.discard)(self.path_of(step))

    def _numbered(self) -> list[int]:
        steps = self._steps_of_names()
        return [step for step in steps if is_checkpoint(self.path_of(step))] if storage.is_remote(self.path) else steps

    def _steps_of_names(self) -> list[int]:
        matches = (_CHECKPOINT.fullmatch(name) for name in storage.folder_names(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def _has_asides(self) -> bool:
        if storage.is_remote(self.path):
            return any(object_store.is_aside(self.path_of(step)) for step in self._steps_of_names())
        return bool(self._asides())

    def _asides(self) -> list[str]:
        return [name for name in storage.folder_names(self.path) if _ASIDE.fullmatch(name)]
