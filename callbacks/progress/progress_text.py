"""Texts of the progress: durations and logs, in Keras's style."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.core.updates.norms import is_of_module


def step_duration_text(secs: float, unit: str = "step") -> str:
    """Returns the text of the duration of a step, or of another unit.

    >>> step_duration_text(2.4), step_duration_text(0.0123), step_duration_text(5e-6)
    ('2s/step', '12ms/step', '5us/step')
    """
    if secs >= 1:
        return f"{secs:.0f}s/{unit}"
    if secs >= 1e-3:
        return f"{secs * 1e3:.0f}ms/{unit}"
    return f"{secs * 1e6:.0f}us/{unit}"


def remaining_text(secs: float) -> str:
    """Returns the text of a remaining time.

    >>> remaining_text(7.9), remaining_text(65), remaining_text(3700)
    ('7s', '1:05', '1:01:40')
    """
    minutes, seconds = divmod(int(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}" if minutes else f"{seconds}s"


def timing_text(timing: Mapping[str, float]) -> str:
    """Returns the text of a run's timing, without activities of less than a tenth of a second.

    >>> timing_text({"data": 0.0, "compile": 1.52, "device": 8.3, "host": 0.1, "total": 9.9, "rows_per_sec": 7140.0})
    'Trained in 9.9s at 7,140 rows/s: compile 1.5s, device 8.3s, host 0.1s'
    """
    parts = [f"{name} {secs:.1f}s" for name, secs in timing.items()
             if name not in ("total", "rows_per_sec") and secs >= 0.05]
    head = f"Trained in {timing['total']:.1f}s at {timing['rows_per_sec']:,.0f} rows/s"
    return f"{head}: {', '.join(parts)}" if parts else head


def log_texts(logs: Mapping[str, Any]) -> list[str]:
    """Returns each log as a name and a value: numbers with four decimals, tiny numbers in scientific notation.

    Norms of single modules are left out: there may be many.

    >>> log_texts({"loss": 0.51234, "error": 1e-5, "note": "warm"})
    ['loss: 0.5123', 'error: 1.0000e-05', 'note: warm']
    """
    return [f"{name}: {_value_text(value)}" for name, value in logs.items()
            if not is_of_module(name)]


def _value_text(value: Any) -> str:
    if np.ndim(value) > 0 or not np.issubdtype(np.asarray(value).dtype, np.number):
        return str(value)
    number = float(value)
    return f"{number:.4e}" if abs(number) <= 1e-3 else f"{number:.4f}"
