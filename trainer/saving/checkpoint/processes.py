"""Agreement between the processes of a run on what happened to files that they share.

Owns the two exchanges that saving and restoring need. Both are collectives: all processes call them in the same order,
and never from a background thread. With one process they cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import jax
import numpy as np

from trainer.saving.checkpoint.manifest import CheckpointError


def from_first(function: Callable[[], str]) -> str:
    """Returns, on every process, what `function` returns on process 0, which alone calls it.

    Raises:
      CheckpointError: on the others, if it raised an exception on process 0, which raises that one.

    >>> from_first(lambda: "step_3")
    'step_3'
    """
    if jax.process_count() == 1:
        return function()
    from jax.experimental import multihost_utils

    error, message = None, b""
    if jax.process_index() == 0:
        try:
            message = json.dumps({"value": function()}).encode()
        except Exception as raised:
            error, message = raised, json.dumps({"error": str(raised)}).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    data = np.frombuffer(message or bytes(length), np.uint8)
    received = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8).tobytes())
    if error is not None:
        raise error
    if "error" in received:
        raise CheckpointError(f"Process 0 has failed: {received['error']}")
    return received["value"]


def raise_together(error: Exception | None) -> None:
    """Waits for all processes, and raises on each of them if one has an error.

    Args:
      error: this process's own; None if it has none.

    Raises:
      Exception: `error` itself, where there is one.
      CheckpointError: if there is none, but another process has one.

    >>> raise_together(None)
    """
    failed = np.array([error is not None])
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = np.asarray(multihost_utils.process_allgather(failed)).reshape(-1)
    if error is not None:
        raise error
    if failed.any():
        raise CheckpointError(f"Process {int(failed.argmax())} could not do its part of a checkpoint. Its own error "
                              "message says why.")
