"""Saves checkpoints alongside training: a folder appears complete under its name, or not at all.

Owns when things happen: what is done before `save` returns, in which order files reach the disk, and who hears of an
error. Knows nothing of what a state or a document means.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compile import jit
from trainer.core import errors, file_locks
from trainer.saving.arrays import safetensors_file
from trainer.saving.checkpoint import disk, layout, plain, processes
from trainer.saving.checkpoint.manifest import CheckpointError, is_checkpoint, write_manifest

_TIMEOUT_SECS = 3600  # of waiting for the other processes' parts
_MAX_FAILED_WRITES = 8  # in the background; Orbax begins about three of them for a checkpoint
_HOST_MEMORY = ("pinned_host", "unpinned_host")
_UNKNOWN_TO_ORBAX = ("uint2", "uint4", "float8_e4m3")
_in_background: list[threading.Thread] = []  # the last save of this process, by whichever writer
_OS_ERROR = re.compile(r"os_error_code='([0-9]+)'")  # in the messages of TensorStore, by which Orbax writes


class CheckpointWriter:
    """Saves one checkpoint at a time, most of it in a background thread. Several writers take turns.

    With several processes, all of them call `save` and `wait` with the same arguments and in the same order. Each
    writes its own part of the arrays to a folder that all of them see, process 0 the rest.

    Use it in a `with` statement, or call `close` in a `finally`: Python ends the thread pools that Orbax writes with
    before it waits for threads, so a save that is not waited for can fail when the process exits. Then a message says
    so. A process that is killed leaves a hidden folder `.<name>.<hex>.tmp` next to the checkpoint's place.

    >>> with CheckpointWriter() as writer:
    ...     writer.save("step_3", {"up/bias": jnp.zeros(3)}, {"epoch": 1})
    >>> sorted(os.listdir("step_3"))
    ['arrays.safetensors', 'document.json', 'manifest.json', 'state']
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        arrays: Mapping[str, jax.Array],
        document: Any,
        replace: bool = False,
        on_saved: Callable[[], None] | None = None,
    ) -> None:
        """Begins to save a checkpoint. On return, arrays and document may be changed, deleted or donated.

        Waits for the save before this save, also another writer's. Arrays in host memory, as all are on CPUs, are
        copied first: there is one more of each until the save is done.

        Args:
          path: the checkpoint's folder. The folder that it is in is made if it does not exist.
          arrays: the arrays by name, on any devices and of any sharding.
          document: a plain value as `plain.encode` takes it.
          replace: whether a checkpoint that is there is replaced, once the new one is complete.
          on_saved: called on process 0, in the background thread, once the checkpoint is in its place. What it raises
            is raised like an error of the save.

        Raises:
          TypeError: if an array is not a JAX array or is a random key, or the document holds what it cannot hold.
          FileExistsError: if there is something at `path` and `replace` is false, or it is not a checkpoint.
          OSError: if the folder cannot be made; or if the save before this one failed, of which nothing is left.
          CheckpointError: if the save before this one failed otherwise, or another process failed.
        """
        self.wait()
        # Orbax's processes meet by the number of the save that began last, and never if another has begun meanwhile.
        for thread in _in_background:
            thread.join()
        place = os.path.realpath(path)
        specs = {name: _spec_of(name, array) for name, array in arrays.items()}
        encoded, document_arrays = plain.encode(document)
        text = json.dumps({"arrays": layout.specs_as_json(specs), "document": encoded}, allow_nan=False).encode()
        lock = contextlib.ExitStack()

        def make_temporary() -> str:
            made, descriptor = _make_temporary(place, replace)
            if descriptor is not None:
                lock.callback(file_locks.close, descriptor)
            return made

        temporary = processes.from_first(make_temporary)
        try:
            finish_state = _begin_state(os.path.join(temporary, layout.STATE),
                                        {name: array for name, array in arrays.items()
                                         if layout.is_in_state(specs[name])})
        except BaseException as error:
            _remove(temporary)
            lock.close()
            if isinstance(error, Exception):
                raise _save_error(os.fspath(path), error) from error
            raise

        def finish() -> None:
            try:
                finish_state()
                if jax.process_index() == 0:
                    _write_document(temporary, text, document_arrays)
                    write_manifest(temporary)
                    disk.put_in_place(temporary, place)
                lock.close()
            except Exception as error:
                self._error = _save_error(os.fspath(path), error)
                if jax.process_index() == 0:
                    _remove(temporary)
                lock.close()
                if not threading.main_thread().is_alive():  # so that nothing will wait
                    print("The process ends without `close` of its CheckpointWriter:", file=sys.stderr)
                    traceback.print_exception(self._error)
                return
            if on_saved is not None and jax.process_index() == 0:
                try:
                    on_saved()
                except Exception as error:
                    self._error = error

        self._thread = threading.Thread(target=finish, name="trainer-checkpoint", daemon=False)
        _in_background[:] = [self._thread]
        self._thread.start()

    def wait(self) -> None:
        """Returns once the checkpoint is in its place, on all processes.

        Raises:
          OSError: if it could not be written, because the disk is full, for example. Nothing is left of it.
          CheckpointError: if the save failed otherwise, or failed on another process.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        processes.raise_together(error)

    def close(self) -> None:
        """Waits like `wait`, and raises what it raises. The writer can be used again."""
        self.wait()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _spec_of(name: Any, array: Any) -> layout.Spec:
    if not isinstance(name, str):
        raise errors.wrong_type("arrays", name, "a mapping from names, which are strings, to arrays")
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise errors.wrong_type(f"arrays[{name!r}]", array, "a JAX array")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"The array {name!r} is a random key, which a checkpoint cannot hold. Save "
                        "`jax.random.key_data` of it.")
    if array.dtype.name in _UNKNOWN_TO_ORBAX:
        raise TypeError(f"The array {name!r} has the dtype {array.dtype}, which Orbax cannot save.")
    return tuple(array.shape), np.dtype(array.dtype)


def _make_temporary(path: str, replace: bool) -> tuple[str, int | None]:
    if os.path.lexists(path):
        if not replace:
            raise FileExistsError(f"There is something at {path!r} already. Save elsewhere, or pass `replace=True`.")
        if not is_checkpoint(path):
            raise FileExistsError(f"What is at {path!r} is not a checkpoint, so it is not replaced. Save elsewhere.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return disk.make_temporary(path)


def _begin_state(path: str, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Begins to write the arrays; returns a function that waits until they are written."""
    if not arrays:
        return lambda: None
    import orbax.checkpoint as ocp  # takes about a second to import

    # Its folders are made here, as threads that wait for them would wait on if they cannot be made.
    options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_SECS, create_directories_asynchronously=False)
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), async_options=options)
    items = {layout.item_name(name): array for name, array in _out_of_reach(arrays).items()}

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            _end_threads(checkpointer)

    try:
        checkpointer.save(path, args=ocp.args.StandardSave(items))
    except BaseException:
        _end_threads(checkpointer)
        raise
    return finish


def _end_threads(checkpointer: Any) -> None:
    for _ in range(_MAX_FAILED_WRITES):
        # Each call raises the error of one write that failed, and ends nothing if there is one.
        with contextlib.suppress(Exception):
            checkpointer.close()
            return


def _out_of_reach(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the arrays, those in host memory as copies.

    Orbax copies from devices to the host before its save returns. What is on the host already it reads in place, later,
    when a train step may have taken the buffer.
    """
    by_devices: dict[Any, dict[str, jax.Array]] = collections.defaultdict(dict)  # one program runs on one set of them
    for name, array in arrays.items():
        if _is_on_host(array):
            if array.is_fully_replicated and jax.process_count() == 1:
                array = array.addressable_shards[0].data  # one copy is enough, whatever it is restored to
            mesh = getattr(array.sharding, "mesh", None)
            devices = frozenset(array.sharding.device_set) if mesh is None else tuple(mesh.devices.flat)
            by_devices[devices][name] = array
    copies: dict[str, jax.Array] = {}
    for group in by_devices.values():
        copies.update(jit.copy_buffers(group))
    return {name: copies.get(name, array) for name, array in arrays.items()}


def _is_on_host(array: jax.Array) -> bool:
    return array.sharding.memory_kind in _HOST_MEMORY or "cpu" in {device.platform for device in array.devices()}


def _write_document(folder: str, text: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    safetensors_file.save_arrays(os.path.join(folder, layout.DOCUMENT_ARRAYS), arrays)
    with open(os.path.join(folder, layout.DOCUMENT), "wb") as file:
        file.write(text)


def _save_error(path: str, error: Exception) -> Exception:
    inside = _OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(inside[1]) if inside else None
    if number is not None:
        named: Exception = OSError(number, f"The checkpoint {path!r} could not be saved: {os.strerror(number)}")
    else:
        named = CheckpointError(f"The checkpoint {path!r} could not be saved: {type(error).__name__}: {error}")
    named.__cause__ = error  # also where it is not raised at once
    return named


def _remove(folder: str) -> None:
    """Removes a partial checkpoint."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)  # writes of Orbax that are under way make the folder again
        if not os.path.lexists(folder):
            return
