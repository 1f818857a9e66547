"""Program that runs a Ray node (`ray start`) as long as its parent process lives.

    python -m trainer.distribute.parameter_server.processes.ray_node ARGUMENTS...

It ends Ray at the end of standard input, which is the end of the parent, even if the parent is killed. Ray gives a node
30 s to start, which is too little on a busy machine, so the start is retried.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

_ATTEMPTS = 4
_STARTING = 90.0  # a node that ends within these seconds has failed to start
_END = 20.0  # seconds for Ray to end its processes


def main() -> int:
    """Runs `ray start` with the arguments of the command line; returns its exit code."""
    is_over = threading.Event()

    def watch_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        is_over.set()

    threading.Thread(target=watch_parent, daemon=True).start()
    code = 0
    for _ in range(_ATTEMPTS):
        begin = time.monotonic()
        code = _run(is_over)
        if is_over.is_set() or time.monotonic() - begin > _STARTING:
            break
    return code


def _run(is_over: threading.Event) -> int:
    node = subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *sys.argv[1:]],
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while node.poll() is None and not is_over.wait(0.2):
        pass
    if node.poll() is None:
        node.terminate()  # `ray start --block` then ends all its processes
        try:
            node.wait(_END)
        except subprocess.TimeoutExpired:
            node.kill()
    return node.wait()


if __name__ == "__main__":
    sys.exit(main())
