"""The processes of a mesh, as the data are read by: who they are, and how their messages travel.

Owns the exchange of small texts through JAX's key-value store. It goes without the devices, as threads that read ahead
exchange while the main thread's executions run over them, in an order that differs between processes.
"""

from __future__ import annotations

import functools
import time

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.data.prefetch import is_abandoned
from trainer.data.processes import Processes
from trainer.distribute.join_cluster import patience_secs
from trainer.distribute.store import jax_store

_KEYS = "trainer/data/"
_FIRST_WAIT_SECS, _LAST_WAIT_SECS = 0.0005, 0.02


def processes_of(mesh: Mesh, replicas: int) -> Processes:
    """Returns the processes that have a mesh's devices.

    Args:
      mesh: the devices.
      replicas: how many replicas there are on it.
    """
    indices = sorted({device.process_index for device in mesh.devices.flat})
    if len(indices) == 1 or jax.process_index() not in indices:
        return Processes()
    return Processes(indices.index(jax.process_index()), len(indices), max(replicas // len(indices), 1),
                     functools.partial(_exchanged, len(indices)), _gathered)


def _exchanged(count: int, key: str, text: str, before: str | None) -> list[str]:
    """Returns the texts of all processes for a key; removes this one's for the key before, which all have read."""
    store, folder, deadline = jax_store(), f"{_KEYS}{key}/", time.monotonic() + patience_secs()
    store.key_value_set(f"{folder}{jax.process_index()}", text)
    wait_secs = _FIRST_WAIT_SECS
    # No waiting in the store itself: a thread that nobody waits for any more must come back from it.
    while len(pairs := store.key_value_dir_get(folder)) < count:
        if is_abandoned():
            raise RuntimeError("Nobody waits for these data any more.")
        if time.monotonic() > deadline:
            here = sorted(int(name.rpartition("/")[2]) for name, _ in pairs)
            raise TimeoutError(f"DEADLINE_EXCEEDED: after {patience_secs():g} s only processes {here} have read on.")
        time.sleep(wait_secs)
        wait_secs = min(1.5 * wait_secs, _LAST_WAIT_SECS)
    if before is not None:
        store.key_value_delete(f"{_KEYS}{before}/{jax.process_index()}")
    texts = {int(name.rpartition("/")[2]): value for name, value in pairs}
    return [texts[index] for index in sorted(texts)]


def _gathered(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))
