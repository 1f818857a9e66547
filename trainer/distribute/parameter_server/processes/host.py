"""The object of a process of the cluster, and the answers to its calls.

Local processes and Ray's actors share it: a call arrives as bytes, and its result or exception leaves as bytes.
"""

from __future__ import annotations

from typing import Any

from trainer.distribute.parameter_server.processes.failures import RemoteFailure
from trainer.distribute.parameter_server.processes.wire import Packed, pack, unpack

RETURNED, RAISED = "returned", "raised"


class Host:
    """Holds a `Worker` or a `ParameterServer`, made by a packed function, and calls it."""

    def __init__(self, make: Packed):
        self._served: Any = unpack(make)()

    def answer(self, method: str, arguments: Packed) -> tuple[str, Packed]:
        """Returns `RETURNED` and the result of a method with packed arguments, or `RAISED` and its `RemoteFailure`."""
        # BaseException, because a function that exits must not end the process, as if it had crashed.
        try:
            returned = getattr(self._served, method)(*unpack(arguments, getattr(self._served, "resource", None)))
            return RETURNED, pack(returned)[0]
        except BaseException as error:
            return RAISED, pack(RemoteFailure.of(error))[0]
