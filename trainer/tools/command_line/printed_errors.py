"""Errors of `python -m trainer` as they are printed: without a traceback if the message says all."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def print_errors_with(
    show: Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]
) -> Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]:
    """Returns a hook, see `sys.excepthook`, that prints an error whose message says all as "error: ..."; `show` prints
    all other errors.
    """
    def print_error(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        # Not at the top: it imports JAX, and `launch` starts without it.
        from trainer.core.calls.tracebacks import says_all

        if not isinstance(error, Exception) or not says_all(error):
            show(kind, error, traceback)
            return
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)

    return print_error
