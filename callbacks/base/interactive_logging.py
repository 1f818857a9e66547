"""Where the trainer's messages go: to standard output, or to `logging`."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger(__name__.partition(".")[0])  # "trainer", by which users set its level

_is_enabled = True


def enable_interactive_logging() -> None:
    """Lets progress and the messages of callbacks go to standard output, as they do from the start.

    Source: https://keras.io/api/utils/config_utils/#enable_interactive_logging-function.
    """
    global _is_enabled
    _is_enabled = True


def disable_interactive_logging() -> None:
    """Lets progress and the messages of callbacks go to the logger "trainer" of `logging`, at the level INFO.

    No bar is drawn; there is a record for each epoch, and in long epochs more. Python shows no records of this level
    before `logging.basicConfig(level=logging.INFO)` or the like is called.

    Source: https://keras.io/api/utils/config_utils/#disable_interactive_logging-function.
    """
    global _is_enabled
    _is_enabled = False


def is_interactive_logging_enabled() -> bool:
    """Returns whether progress and the messages of callbacks go to standard output.

    >>> is_interactive_logging_enabled()
    True
    """
    return _is_enabled


def print_message(message: str) -> None:
    """Prints a message, or gives it to `logging`."""
    if _is_enabled:
        print(message, flush=True)
    else:
        LOGGER.info("%s", message.strip())
