"""What the chief shares with all workers, each of which gets it once: functions, and arrays."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from trainer.distribute.parameter_server.processes.wire import Resource, pack

_numbers = itertools.count()


class SharedFunction:
    """A function that is the same object in a worker each time it is called there, so that it compiles once.

    Functions are the same if their bytes are: those of a closure over other values differ.
    """

    PREFIX = "function "

    def __init__(self, function: Callable[..., Any], key: str):
        self._resource = Resource(key, lambda worker: function)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> SharedFunction:
        """Returns a function to be sent in the place of `function`."""
        packed, _ = pack(function)
        digest = hashlib.sha256(packed.data)
        for buffer in packed.buffers:
            digest.update(buffer.data)
        return cls(function, cls.PREFIX + digest.hexdigest())

    def __as_resource__(self) -> Resource:
        """Returns what a worker gets for it."""
        return self._resource


class SharedValue:
    """A value that a worker gets once, such as the arrays of `fit`, and keeps as long as this exists.

    Args:
      build: returns the value from the `Worker` that it is for.
      release: called with its key when this exists no longer.
    """

    def __init__(self, build: Callable[[Any], Any], release: Callable[[str], None]):
        self._resource = Resource(f"value {next(_numbers)}", build)
        weakref.finalize(self, release, self._resource.key).atexit = False

    def __as_resource__(self) -> Resource:
        """Returns what a worker gets for it."""
        return self._resource
