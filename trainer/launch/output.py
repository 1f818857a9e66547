"""The outputs of several processes as a single stream: whole lines, each with its worker's number.

Owns lines and prefixes. Knows nothing of processes. Bytes pass unchanged.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

_MAX_LINE_BYTES = 2**20  # longer lines are split
_BAR_EVERY_SECS = 10.0
_LAST_LINES = 20
_TRACEBACK = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
_IGNORED = "Exception ignored in"  # in an object that Python clears at exit, after the actual error
_CHAINS = ("During handling of the above exception, another exception occurred:",
           "The above exception was the direct cause of the following exception:")


class LineSplitter:
    """Splits the bytes of a stream into lines as they arrive.

    A carriage return overwrites a line, as in a progress bar. Only the last state of such a line is emitted: when it is
    complete and, until then, every ten seconds.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\\ntw"), splitter.feed(b"o\\n 5%\\r10%"), splitter.rest()
    ([b'one'], [b'two'], [b'10%'])
    """

    def __init__(self) -> None:
        self._pending = b""
        self._last_line_at = time.monotonic()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines, without line ends, that these bytes complete."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        now = time.monotonic()
        if b"\r" in self._pending:
            *overwritten, current = self._pending.split(b"\r")
            self._pending = _last_state(overwritten) + b"\r" + current  # limits the size of a pending progress bar
            if now - self._last_line_at >= _BAR_EVERY_SECS:
                lines.append(self._pending)
        if len(self._pending) > _MAX_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        if lines:
            self._last_line_at = now
        return [_last_state(line.split(b"\r")) for line in lines]

    def rest(self) -> list[bytes]:
        """Returns the unfinished line, if any."""
        line, self._pending = _last_state(self._pending.split(b"\r")), b""
        return [line] if line else []


def show(worker: int, stream: str, lines: Sequence[bytes]) -> None:
    """Writes lines of a worker, without line ends, at once to this process's stream of the same name."""
    prefix = f"[worker {worker}] ".encode()
    _write(stream, b"".join(prefix + line + b"\n" for line in lines))


def say(message: str) -> None:
    """Writes a message of the launcher to stderr, if it is still writable."""
    with contextlib.suppress(OSError):
        _write("stderr", f"[launcher] {message}\n".encode())


def end_of(lines: Sequence[bytes]) -> list[bytes]:
    """Returns the most informative lines about a failure: from its traceback on, or else the last lines.

    Args:
      lines: the last lines of a process's stderr.

    >>> end_of([b"step 1", b"Traceback (most recent call last):", b"  ...", b"ValueError: no"])
    [b'Traceback (most recent call last):', b'  ...', b'ValueError: no']
    """
    texts = [line.decode(errors="replace").rstrip() for line in lines]
    begins = [number for number, text in enumerate(texts)
              if text in _TRACEBACK and not texts[max(number - 1, 0)].startswith(_IGNORED)]
    if not begins:
        return list(lines[-_LAST_LINES:])
    begin = begins.pop()
    while begins and any(text in _CHAINS for text in texts[begins[-1]:begin]):  # this traceback explains the next
        begin = begins.pop()
    return list(lines[begin:])


def _last_state(states: Sequence[bytes]) -> bytes:
    return next(filter(None, reversed(states)), b"")


def _write(stream: str, data: bytes) -> None:
    file = getattr(sys, stream)
    buffer = getattr(file, "buffer", None)
    if buffer is None:  # a notebook's stream accepts text only
        file.write(data.decode(errors="replace"))
    else:
        file.flush()
        buffer.write(data)
        buffer.flush()
    file.flush()
