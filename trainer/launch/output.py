"""The outputs of several processes as one stream: whole lines, each with its worker's number.

Owns lines and prefixes. Knows nothing of processes. Bytes pass as they are, whatever they mean.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

_MAX_LINE_BYTES = 2**20  # a longer line is shown in parts
_BAR_EVERY_SECS = 10.0
_LAST_LINES = 20
_TRACEBACK = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
_IGNORED = "Exception ignored in"  # of an object that Python clears at its end, after the error that ended it
_CHAINS = ("During handling of the above exception, another exception occurred:",
           "The above exception was the direct cause of the following exception:")


class LineSplitter:
    """Makes lines of one stream's bytes as they come.

    A carriage return takes a line back to its start, as a progress bar does: of such a line only the last state is
    passed on, when it is complete and, meanwhile, every ten seconds.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\\ntw"), splitter.feed(b"o\\n 5%\\r10%"), splitter.rest()
    ([b'one'], [b'two'], [b'10%'])
    """

    def __init__(self) -> None:
        self._pending = b""
        self._last_line_at = time.monotonic()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines, without their ends, that these bytes complete."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        now = time.monotonic()
        if b"\r" in self._pending:
            *overwritten, current = self._pending.split(b"\r")
            self._pending = _last_state(overwritten) + b"\r" + current  # so that a bar does not pile up
            if now - self._last_line_at >= _BAR_EVERY_SECS:
                lines.append(self._pending)
        if len(self._pending) > _MAX_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        if lines:
            self._last_line_at = now
        return [_last_state(line.split(b"\r")) for line in lines]

    def rest(self) -> list[bytes]:
        """Returns the line that was begun and not ended, if any."""
        line, self._pending = _last_state(self._pending.split(b"\r")), b""
        return [line] if line else []


def show(worker: int, stream: str, lines: Sequence[bytes]) -> None:
    """Writes lines of one worker, at once, to this process's stream of the same name.

    Args:
      worker: the worker's index.
      stream: "stdout" or "stderr".
      lines: what to write, without line ends.
    """
    prefix = f"[worker {worker}] ".encode()
    _write(stream, b"".join(prefix + line + b"\n" for line in lines))


def say(message: str) -> None:
    """Writes a message of the launcher's own to stderr, if that can still be written to."""
    with contextlib.suppress(OSError):
        _write("stderr", f"[launcher] {message}\n".encode())


def end_of(lines: Sequence[bytes]) -> list[bytes]:
    """Returns what says most about a failure: all from its traceback on, or else the last lines.

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
    while begins and any(text in _CHAINS for text in texts[begins[-1]:begin]):  # this one explains the next
        begin = begins.pop()
    return list(lines[begin:])


def _last_state(states: Sequence[bytes]) -> bytes:
    return next(filter(None, reversed(states)), b"")


def _write(stream: str, data: bytes) -> None:
    file = getattr(sys, stream)
    buffer = getattr(file, "buffer", None)
    if buffer is None:  # a notebook's stream takes text only
        file.write(data.decode(errors="replace"))
    else:
        file.flush()
        buffer.write(data)
        buffer.flush()
    file.flush()
