"""Agreement between the processes of a run on the state of shared files.

Owns the two exchanges that saving and restoring need. All processes call them in the same order, and never from a
background thread. With a single process they cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from trainer.core.received_text import printable
from trainer.distribute.cluster import ProcessGroup
from trainer.engine.saving.checkpoint.manifest import CheckpointError


def from_first(function: Callable[[], str]) -> str:
    """Calls `function` on process 0 only, and returns its return value on every process.

    Raises:
      CheckpointError: on other processes, if process 0 raised an exception, which it re-raises.

    >>> from_first(lambda: "step_3")
    'step_3'
    """
    group = ProcessGroup.of_all()
    if group.count == 1:
        return function()
    outcome: dict[str, str] = {}
    failure: Exception | None = None
    if group.index == 0:
        try:
            outcome = {"value": function()}
        except Exception as error:
            outcome, failure = {"error": str(error)}, error
    received = json.loads(group.all_gather(json.dumps(outcome), "checkpoint")[0])
    if failure is not None:
        raise failure
    if "error" in received:
        raise CheckpointError(f"Process 0 has failed: {printable(received['error'], newlines=True)}")
    return received["value"]


def raise_together(error: Exception | None) -> None:
    """Waits for all processes, and raises on each of them if any process has an error.

    Args:
      error: error of this process, or None.

    Raises:
      Exception: `error` itself, if any.
      CheckpointError: if only another process has an error.

    >>> raise_together(None)
    """
    failed = ProcessGroup.of_all().all_gather("failed" if error is not None else "", "checkpoint")
    if error is not None:
        raise error
    if any(failed):
        raise CheckpointError(f"Process {failed.index('failed')} could not do its part of a checkpoint. Its own error "
                              "message says why.")
