"""Destination of the trainer's messages: standard output or `logging`."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger(__name__.partition(".")[0])  # "trainer", by which users set its level

_is_enabled = True


def enable_interactive_logging() -> None:
    """Sends progress, summaries and messages to standard output, the default.

    Source: https://keras.io/api/utils/config_utils/#enable_interactive_logging-function.
    """
    global _is_enabled
    _is_enabled = True


def disable_interactive_logging() -> None:
    """Sends progress, summaries and messages to the logger "trainer" of `logging`, at the level INFO.

    No bar is drawn. Each epoch logs a record, and long epochs log more. Python shows no INFO records unless logging
    is configured, for example by `logging.basicConfig(level=logging.INFO)`.

    Source: https://keras.io/api/utils/config_utils/#disable_interactive_logging-function.
    """
    global _is_enabled
    _is_enabled = False


def is_interactive_logging_enabled() -> bool:
    """Returns whether progress, summaries and messages go to standard output.

    >>> is_interactive_logging_enabled()
    True
    """
    return _is_enabled


def print_message(message: str) -> None:
    """Prints a message, or logs it if interactive logging is disabled."""
    if _is_enabled:
        print(message, flush=True)
    else:
        LOGGER.info("%s", message.strip())
