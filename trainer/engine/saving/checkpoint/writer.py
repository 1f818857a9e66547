"""Saves checkpoints during training: a folder appears complete under its name, or not at all.

Owns the order of events: the work before `save` returns, the order in which files reach the disk, and the delivery of
errors. Knows nothing of the meaning of a state or a document.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import errors, plain
from trainer.core.compile import jit
from trainer.core.files import new_file, storage
from trainer.distribute.cluster import ProcessGroup
from trainer.engine.saving.arrays import file_locks, safetensors_file
from trainer.engine.saving.checkpoint import array_shards, disk, layout, object_store, orbax_arrays, processes
from trainer.engine.saving.checkpoint.manifest import (
    CheckpointError,
    is_checkpoint,
    size_and_hash,
    write_manifest,
)

LOGGER = logging.getLogger(__name__)

_HOST_MEMORY = ("pinned_host", "unpinned_host")
_in_background: list[threading.Thread] = []  # the last save of this process, by whichever writer


class CheckpointWriter:
    """Saves one checkpoint at a time, mostly in a background thread. Several writers take turns.

    With several processes, all processes call `save` and `wait` with the same arguments and in the same order. Each
    process writes its own shards of the arrays to a shared folder; process 0 writes the rest. In an object store, the
    manifest is written last; see `object_store`.

    Use the writer in a `with` statement, or call `close` in a `finally`: both raise the error of the last save. A
    process that exits without them finishes its save first, and prints the error. A killed process leaves a hidden
    folder `.<name>.<hex>.tmp` beside the checkpoint.

    >>> with CheckpointWriter() as writer:
    ...     writer.save("step_3", {"up/bias": jnp.zeros(3)}, {"epoch": 1})
    >>> sorted(os.listdir("step_3"))
    ['arrays.safetensors', 'document.json', 'manifest.json', 'state']
    """

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._has_room: bool | None = None  # on the devices of all processes; known from the first save on
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        arrays: Mapping[str, jax.Array],
        document: object,
        replace: bool = False,
        on_saved: Callable[[], None] | None = None,
        as_orbax: bool = False,
    ) -> None:
        """Starts to save a checkpoint. After the return, arrays and document may be changed, deleted or donated.

        Waits for the previous save, also of another writer. The arrays are copied on their devices, and the copies may
        still be in progress on return: there is an additional copy of each array until the save is done. If, at a
        writer's first save, a device has no room for the copies beside its peak memory, device arrays are copied to the
        host instead, before the return.

        Args:
          path: folder of the checkpoint. Its parent folder is created if missing.
          arrays: arrays by name, on any devices and with any sharding.
          document: plain value, as in `plain.encode`.
          replace: whether to replace an existing checkpoint, after the new checkpoint is complete.
          on_saved: function called on process 0, in the background thread, after the checkpoint is in place. Its errors
            are raised like errors of the save.
          as_orbax: whether to write the arrays as a tree that Orbax reads; see `orbax_arrays`. Only on the local disk.

        Raises:
          ImportError: if Orbax is to write and is not installed.
          TypeError: if an array is not a JAX array or is a random key, or the document has an unsupported value.
          FileExistsError: if `path` exists and `replace` is false, or `path` is not a checkpoint.
          OSError: if the folder cannot be created, or if the previous save failed, which leaves nothing behind.
          CheckpointError: if the previous save failed otherwise, or another process failed.
        """
        if as_orbax:
            orbax_arrays.check_installed()
        self.wait()
        # One at a time, so that at most one copy of the state is in memory.
        for thread in _in_background:
            thread.join()
        place = storage.real(path)
        specs = {name: _spec_of(name, array) for name, array in arrays.items()}
        encoded, document_arrays = plain.encode(document)
        text = json.dumps({"arrays": layout.specs_as_json(specs), "document": encoded,
                           layout.PROCESSES: jax.process_count(), **({layout.ORBAX: True} if as_orbax else {})},
                          allow_nan=False).encode()
        lock = contextlib.ExitStack()

        def make_temporary() -> str:
            made, descriptor = _make_temporary(place, replace)
            if descriptor is not None:
                lock.callback(file_locks.close, descriptor)
            storage.make_folder(os.path.join(made, layout.ORBAX if as_orbax else layout.STATE))
            return made

        temporary = processes.from_first(make_temporary)
        if self._group is None:
            self._group = ProcessGroup.of_all().subgroup()  # the thread's own, as the main thread continues meanwhile
        group = self._group
        try:
            copies = self._copies_of({name: _one_of_each(array) for name, array in arrays.items()})
        except BaseException as error:
            if jax.process_index() == 0:
                _abandon(temporary)
            lock.close()
            if isinstance(error, Exception):
                raise _save_error(os.fspath(path), error) from error
            raise

        begin = time.monotonic()

        def finish() -> None:
            try:
                files = _write_together(temporary, copies, group, as_orbax)
                if jax.process_index() == 0:
                    if as_orbax:
                        orbax_arrays.finish(temporary)
                    _write_document(temporary, text, document_arrays)
                    _put_in_place(temporary, place, files)
                    LOGGER.info("Saved %r in %.1f s.", os.fspath(path), time.monotonic() - begin)
                lock.close()
            except Exception as error:
                self._error = _save_error(os.fspath(path), error)
                copies.clear()  # the thread lives on as an attribute
                if jax.process_index() == 0:
                    _abandon(temporary)
                lock.close()
                if not threading.main_thread().is_alive():  # so that nothing will wait
                    LOGGER.error("The process ends without `close` of its CheckpointWriter", exc_info=self._error)
                return
            if on_saved is not None and jax.process_index() == 0:
                try:
                    on_saved()
                except Exception as error:
                    self._error = error

        self._thread = threading.Thread(target=finish, name="trainer-checkpoint", daemon=False)
        _in_background[:] = [self._thread]
        self._thread.start()

    def _copies_of(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        copies: dict[str, jax.Array] = {}
        failure: Exception | None = None
        try:
            copies = _out_of_reach(arrays, self._copies_fit(arrays))
        except Exception as error:
            failure = error
        processes.raise_together(failure)  # otherwise a process could begin to write, and wait for a failed process
        return copies

    def _copies_fit(self, arrays: Mapping[str, jax.Array]) -> bool:
        if self._has_room is None:  # asked once: later, the devices' peak includes the copies
            self._has_room = not ProcessGroup.of_all().any(not _fit_beside(arrays.values()), "checkpoint")
        return self._has_room

    def wait(self) -> None:
        """Waits until the checkpoint is in place, on all processes.

        Raises:
          OSError: if it cannot be written, for example because the disk is full. Nothing is left of it.
          CheckpointError: if the save failed otherwise, or failed on another process.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        processes.raise_together(error)

    def close(self) -> None:
        """Waits like `wait`, and raises its errors. The writer can be used again."""
        self.wait()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _spec_of(name: object, array: object) -> layout.Spec:
    if not isinstance(name, str):
        raise errors.wrong_type("arrays", name, "a mapping from names, which are strings, to arrays")
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise errors.wrong_type(f"arrays[{name!r}]", array, "a JAX array")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"The array {name!r} is a random key, which a checkpoint cannot hold. Save "
                        "`jax.random.key_data` of it.")
    return tuple(array.shape), np.dtype(array.dtype)


def _make_temporary(path: str, replace: bool) -> tuple[str, int | None]:
    if storage.is_remote(path):
        return object_store.begin(path, replace), None
    if os.path.lexists(path):
        if not replace:
            raise FileExistsError(f"There is something at {path!r} already. Save elsewhere, or pass `replace=True`.")
        if not is_checkpoint(path):
            raise FileExistsError(f"{path!r} is not a checkpoint, so it is not replaced. Save elsewhere.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return disk.make_temporary(path)


def _write_together(
    folder: str, arrays: dict[str, jax.Array], group: ProcessGroup, as_orbax: bool
) -> dict[str, dict[str, Any]]:
    """Writes this process's shards; returns the hashed files of all processes, after they have written their shards."""
    error: Exception | None = None
    files: dict[str, dict[str, Any]] = {}
    try:
        if as_orbax:
            orbax_arrays.write(folder, arrays)
            arrays.clear()
        else:
            written_here = array_shards.write_shards(os.path.join(folder, layout.STATE), jax.process_index(), arrays)
            files = {f"{layout.STATE}/{name}": file for name, file in written_here.items()}
    except Exception as failure:
        error = failure
    written = [json.loads(text) for text in group.all_gather(json.dumps(None if error else files), "checkpoint")]
    if error is not None:
        raise error
    if None in written:
        raise CheckpointError(f"process {written.index(None)} could not write its part.")
    return {name: file for each in written for name, file in each.items()}


def _out_of_reach(arrays: Mapping[str, jax.Array], on_devices: bool) -> dict[str, jax.Array]:
    """Returns copies of the arrays, on their devices or on the host, because a train step may reuse their memory."""
    by_devices: dict[Any, dict[str, jax.Array]] = collections.defaultdict(dict)  # one program runs on one set of them
    copies = {}
    for name, array in arrays.items():
        if on_devices or _is_on_host(array):
            mesh = getattr(array.sharding, "mesh", None)
            devices = frozenset(array.sharding.device_set) if mesh is None else tuple(mesh.devices.flat)
            by_devices[devices][name] = array
        else:
            copies[name] = jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    jax.block_until_ready(copies)
    for group in by_devices.values():
        copies.update(jit.copy_buffers(group))
    return copies


def _one_of_each(array: jax.Array) -> jax.Array:
    """Returns an array without its replicas, because a single replica is enough for any restore."""
    return array.addressable_shards[0].data if array.is_fully_replicated and jax.process_count() == 1 else array


def _fit_beside(arrays: Iterable[jax.Array]) -> bool:
    """Returns whether each device of this process has room for copies beside its peak memory."""
    needed: collections.Counter[jax.Device] = collections.Counter()
    for array in arrays:
        if not _is_on_host(array):
            needed.update({shard.device: shard.data.nbytes for shard in array.addressable_shards})
    return all(_free_bytes(device) >= count for device, count in needed.items())


def _free_bytes(device: jax.Device) -> int:
    stats = device.memory_stats() or {}  # of some allocators nothing is known
    return stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)


def _is_on_host(array: jax.Array) -> bool:
    return array.sharding.memory_kind in _HOST_MEMORY or "cpu" in {device.platform for device in array.devices()}


def _write_document(folder: str, text: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    safetensors_file.save_arrays(os.path.join(folder, layout.DOCUMENT_ARRAYS), arrays)
    with new_file(os.path.join(folder, layout.DOCUMENT)) as file:
        file.write(text)


def _put_in_place(temporary: str, path: str, state: dict[str, dict[str, Any]]) -> None:
    """Makes written files the checkpoint at `path`, in one step."""
    if storage.is_remote(path):
        others = {name: size_and_hash(os.path.join(temporary, name), temporary)
                  for name in (layout.DOCUMENT, layout.DOCUMENT_ARRAYS)}
        object_store.put_in_place(temporary, path, state | others)
    else:
        write_manifest(temporary, state)
        disk.put_in_place(temporary, path)


def _abandon(temporary: str) -> None:
    with contextlib.suppress(OSError):  # the next save tries again
        storage.remove(temporary)


def _save_error(path: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and (number := error.errno) is not None:
        named: Exception = OSError(number, f"The checkpoint {path!r} could not be saved: {os.strerror(number)}")
    else:
        named = CheckpointError(f"The checkpoint {path!r} could not be saved: {type(error).__name__}: {error}")
    named.__cause__ = error  # also where it is not raised at once
    return named
