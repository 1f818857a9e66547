"""What keeps a node of Ray running as long as the process that started it: `ray start`, and its end.

    python -m trainer.distribute.parameter_server.processes.ray_node ARGUMENTS...

Ends Ray at the end of standard input, which is that of the process that started this, however it ends. Ray gives a node
30 s to start, which is too little on a busy machine: it is tried again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

_ATTEMPTS = 4
_STARTING = 90.0  # seconds in which a node that ends has failed to start
_END = 20.0  # seconds that Ray has to end its processes


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
        node.terminate()  # at which `ray start --block` ends all that it has started
        try:
            node.wait(_END)
        except subprocess.TimeoutExpired:
            node.kill()
    return node.wait()


if __name__ == "__main__":
    sys.exit(main())
