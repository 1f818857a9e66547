"""Worker: holds resources by key, and runs functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.core.ambient.processes import SentContext
from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.processes.wire import Packed, unpack


class Worker:
    """The object of a worker's process."""

    def __init__(self, index: int, num_workers: int, servers: Sequence[Handle]):
        self.index, self.num_workers = index, num_workers
        self.servers = list(servers)
        self._held: dict[str, Packed] = {}
        self._built: dict[str, Any] = {}
        self._lock = threading.RLock()

    def hold(self, key: str, build: Packed) -> None:
        """Keeps a resource, as a packed function that builds it, until a function names it."""
        self._held[key] = build

    def forget(self, key: str) -> None:
        """Removes a resource."""
        self._held.pop(key, None)
        self._built.pop(key, None)

    def resource(self, key: str) -> Any:
        """Returns a resource, built at its first use."""
        with self._lock:
            if key not in self._built:
                self._built[key] = unpack(self._held[key], self.resource)(self)
                del self._held[key]
            return self._built[key]

    def resource_or_make(self, key: str, make: Callable[[Worker], Any]) -> Any:
        """Returns a resource; if the worker has none with this key, the result of `make`, which is kept."""
        with self._lock:
            if key not in self._built and key not in self._held:
                self._built[key] = make(self)
            return self.resource(key)

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], context: SentContext
    ) -> Any:
        """Returns the result of a function, run in the context in which the chief scheduled it."""
        with context.entered():
            return function(*args, **kwargs)

    def ready(self) -> bool:
        """Returns True once the process answers."""
        return True
