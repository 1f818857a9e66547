"""The one object that a process of the cluster is there for, and how calls of it are answered.

The same for local processes and Ray's actors: a call comes as bytes, and its result, or its exception, leaves as bytes.
"""

from __future__ import annotations

from typing import Any

from trainer.distribute.parameter_server.processes.failures import RemoteFailure
from trainer.distribute.parameter_server.processes.wire import Packed, pack, unpack

RETURNED, RAISED = "returned", "raised"


class Host:
    """Holds a `Worker` or a `ParameterServer`, and calls it.

    Args:
      make: a packed function that returns it.
    """

    def __init__(self, make: Packed):
        self._served: Any = unpack(make)()

    def answer(self, method: str, arguments: Packed) -> tuple[str, Packed]:
        """Returns `RETURNED` and what a method returned, or `RAISED` and its `RemoteFailure`.

        Args:
          method: the method of the object.
          arguments: a packed tuple of its arguments.
        """
        # BaseException: a function that exits must not end the process, which would look like a crash.
        try:
            returned = getattr(self._served, method)(*unpack(arguments, getattr(self._served, "resource", None)))
            return RETURNED, pack(returned)[0]
        except BaseException as error:
            return RAISED, pack(RemoteFailure.of(error))[0]
