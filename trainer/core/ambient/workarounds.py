"""The switch of what the trainer does about gaps and faults of JAX: `TRAINER_WORKAROUNDS=0` in the environment.

Each workaround says why it is there and with which versions of JAX it was seen to be needed, and has a test that fails
when JAX does not need it any more.
"""

from __future__ import annotations

import os

SWITCH = "TRAINER_WORKAROUNDS"


def are_on() -> bool:
    """Returns whether the environment leaves the workarounds on."""
    return os.environ.get(SWITCH, "1") != "0"
