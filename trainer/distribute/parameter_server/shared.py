"""Functions and values that the chief shares with all workers; each worker gets them once."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from trainer.distribute.parameter_server.processes.wire import Resource, pack

_numbers = itertools.count()


class SharedFunction:
    """A function that is a single object in a worker over all its calls, so that it compiles once.

    Functions are the same if their bytes are equal; closures over different values differ.
    """

    PREFIX = "function "

    def __init__(self, function: Callable[..., Any], key: str):
        self._resource = Resource(key, lambda worker: function)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> SharedFunction:
        """Returns a function to be sent in place of `function`."""
        packed, _ = pack(function)
        digest = hashlib.sha256(packed.data)
        for buffer in packed.buffers:
            digest.update(buffer.data)
        return cls(function, cls.PREFIX + digest.hexdigest())

    def __as_resource__(self) -> Resource:
        """Returns its resource for workers."""
        return self._resource


class SharedValue:
    """A value that a worker gets once, such as the arrays of `fit`, and keeps as long as this object exists.

    Args:
      build: returns the value from the receiving `Worker`.
      release: called with its key when this object no longer exists.
    """

    def __init__(self, build: Callable[[Any], Any], release: Callable[[str], None]):
        self._resource = Resource(f"value {next(_numbers)}", build)
        weakref.finalize(self, release, self._resource.key).atexit = False

    def __as_resource__(self) -> Resource:
        """Returns its resource for workers."""
        return self._resource
