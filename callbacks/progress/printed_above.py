"""Prints and log records of other code, which go above a redrawn line of the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from trainer.callbacks.progress.terminal_line import TerminalLine


class PrintedAbove:
    """Replaces `sys.stdout`, and `sys.stderr` if it is a terminal too, until `end` is called.

    Also redirects `logging` handlers that write to either stream.

    Args:
      line: line that is drawn.
    """

    def __init__(self, line: TerminalLine):
        self._replaced: dict[str, tuple[Any, Any]] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced[name] = stream, _Stream(stream, line)
                setattr(sys, name, self._replaced[name][1])
        for stream, own in self._replaced.values():
            _redirect_handlers(stream, own)

    def end(self) -> None:
        """Restores the streams, unless other code has replaced them since."""
        for name, (stream, own) in self._replaced.items():
            if getattr(sys, name) is own:
                setattr(sys, name, stream)
            _redirect_handlers(own, stream)
            own.end()  # other code may have kept it
        self._replaced = {}


def _redirect_handlers(old: Any, new: Any) -> None:
    for handler in _stream_handlers():
        if handler.stream is old:
            with contextlib.suppress(AttributeError):  # it chooses its stream by itself
                handler.setStream(new)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):  # a logger that only has children is a placeholder
            if isinstance(handler, logging.StreamHandler):
                yield handler


class _Stream:
    def __init__(self, stream: Any, line: TerminalLine):
        self.stream = stream
        self.line: TerminalLine | None = line
        self._begun = ""  # a line that has no end yet: `print` writes in parts

    def end(self) -> None:
        self.line = None
        if self._begun:
            self.stream.write(self._begun)
        self._begun = ""

    def write(self, text: str) -> int:
        if self.line is None or "\r" in text:  # a bar of other code is its business
            return self.stream.write(text)
        self._begun += text
        whole, newline, self._begun = self._begun.rpartition("\n")
        if newline:
            self.line.above(self.stream.write, whole + newline)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
