"""The switch of the workarounds for gaps and faults of JAX: `TRAINER_WORKAROUNDS=0` in the environment turns them off.

Each workaround states its reason and the affected versions of JAX, and has a test that fails when JAX no longer needs
it.
"""

from __future__ import annotations

import os

SWITCH = "TRAINER_WORKAROUNDS"


def are_on() -> bool:
    """Returns whether the workarounds are on."""
    return os.environ.get(SWITCH, "1") != "0"
