"""A parameter-server cluster in threads of one process: the semantics of its queue without the start of processes."""

from __future__ import annotations

import itertools
import threading

from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.processes.failures import ProcessLostError
from trainer.distribute.parameter_server.processes.host import Host
from trainer.distribute.parameter_server.processes.wire import Packed, pack
from trainer.distribute.parameter_server.worker import Worker


class InlineHandle(Handle):
    """A worker in this process. A function ends it through `lose_current`."""

    current = threading.local()

    def __init__(self, name):
        self.name = name
        self._host = Host(pack(lambda: Worker(0, 2, []))[0])
        self._is_lost = False

    def _answer(self, method, packed, timeout):
        if self._is_lost:
            raise ProcessLostError(f"{self.name} has ended.")
        InlineHandle.current.handle = self
        copied = Packed(packed.data, [buffer.copy() for buffer in packed.buffers])
        answer = self._host.answer(method, copied)
        if self._is_lost:
            raise ProcessLostError(f"{self.name} has ended.")
        return answer

    def kill(self):
        self._is_lost = True


def lose_current():
    """Ends the worker that runs the calling function."""
    InlineHandle.current.handle.kill()


class InlineStrategy:
    """What a coordinator needs of a strategy."""

    def __init__(self, workers=2, timeout=None):
        numbers = itertools.count()
        self.started = []

        def start(index):
            self.started.append(index)
            return InlineHandle(f"worker {index} (start {next(numbers)})")

        self._coordinator = ClusterCoordinator._of(self, [start(index) for index in range(workers)], start, timeout)
