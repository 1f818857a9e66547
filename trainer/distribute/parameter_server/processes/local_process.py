"""Program of a process of `local_processes.py`: it answers calls on a socket until its parent ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import sys
import threading

from trainer.distribute.cluster import accepted
from trainer.distribute.parameter_server.processes.engine import Host
from trainer.distribute.parameter_server.processes.frames import receive, send
from trainer.distribute.parameter_server.processes.wire import Packed


def main() -> None:
    """Serves with the settings on the first line of standard input; the end of standard input ends this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # output of functions is seen even if the process is killed
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(settings["address"],), daemon=True).start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(settings["address"] + ".new")
    listener.listen(128)
    host = Host(Packed(bytes.fromhex(settings["make"]), []))
    os.rename(settings["address"] + ".new", settings["address"])  # the process now answers
    while True:
        connection = accepted(listener)
        if connection is not None:
            threading.Thread(target=_serve, args=(connection, host), daemon=True).start()


def _end_with_parent(address: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)  # a killed parent could not
    os._exit(0)


def _serve(connection: socket.socket, host: Host) -> None:
    with contextlib.suppress(EOFError, OSError), connection:
        while True:
            send(connection, *host.answer(*receive(connection)))


if __name__ == "__main__":
    main()
