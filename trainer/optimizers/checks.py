"""Checks of the numbers that optimizers and schedules are built from: by keyword, so that errors name the argument."""

from __future__ import annotations

import math
from typing import Any

from trainer.losses.checks import as_number, require, require_positive, require_share

__all__ = ["as_number", "require_decay_rate", "require_non_negative", "require_positive", "require_share"]


def require_non_negative(**arguments: Any) -> None:
    """Raises unless every argument is a finite number of at least 0."""
    require(arguments, "a number of at least 0", lambda number: 0 <= number < math.inf)


def require_decay_rate(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1): the share of an average that survives an update."""
    require(arguments, "a number in [0, 1)", lambda number: 0 <= number < 1)
