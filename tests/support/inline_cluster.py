"""A parameter-server cluster in threads of one process: the semantics of its queue without the start of processes."""

from __future__ import annotations

import itertools
import threading
import weakref

from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
from trainer.distribute.parameter_server.processes.engine import Handle, Host
from trainer.distribute.parameter_server.processes.failures import ProcessLostError
from trainer.distribute.parameter_server.processes.wire import Packed, pack
from trainer.distribute.parameter_server.worker import Worker


class InlineHandle(Handle):
    """A worker or a server in this process. A function ends its worker through `lose_current`.

    Args:
      name: its name in messages.
      make: returns its object.
      around: called with its name, a method, the arguments, and a function that makes the call.
    """

    current = threading.local()
    _handles = weakref.WeakValueDictionary()

    def __init__(self, name, make=lambda: Worker(0, 2, []), around=None):
        self.name = name
        self._host = Host(pack(make)[0])
        self._is_lost = False
        self._around = around
        self._handles[id(self)] = self

    def __reduce__(self):
        return _found, (id(self),)

    def call(self, method, *arguments, timeout=None):
        def answer():
            return super(InlineHandle, self).call(method, *arguments, timeout=timeout)

        return answer() if self._around is None else self._around(self.name, method, arguments, answer)

    def _answer(self, method, packed, timeout):
        if self._is_lost:
            raise ProcessLostError(f"{self.name} has ended.")
        if isinstance(self._host._served, Worker):
            InlineHandle.current.handle = self
        copied = Packed(packed.data, [buffer.copy() for buffer in packed.buffers])
        answer = self._host.answer(method, copied)
        if self._is_lost:
            raise ProcessLostError(f"{self.name} has ended.")
        return answer

    def kill(self):
        self._is_lost = True


def _found(key):
    return InlineHandle._handles[key]


class InlineEngine:
    """Starts a whole cluster in this process: put it in the place of `LocalProcesses`.

    Args:
      around: see `InlineHandle`; of the servers.
    """

    def __init__(self, around=None):
        self._around = around
        self._handles = []

    def start(self, name, role, make):
        self._handles.append(InlineHandle(name, make, self._around if role == "ps" else None))
        return self._handles[-1]

    def close(self, code=0):
        for handle in self._handles:
            handle.kill()


def lose_current():
    """Ends the worker that runs the calling function."""
    InlineHandle.current.handle.kill()


class InlineStrategy:
    """The part of a strategy that a coordinator needs."""

    def __init__(self, workers=2, timeout=None):
        numbers = itertools.count()
        self.started = []

        def start(index):
            self.started.append(index)
            return InlineHandle(f"worker {index} (start {next(numbers)})")

        self._coordinator = ClusterCoordinator._of(self, [start(index) for index in range(workers)], start, timeout)
