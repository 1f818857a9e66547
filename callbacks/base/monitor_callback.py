"""Base of callbacks that watch a log and compare its values."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from trainer.callbacks.base.callback import Callback, LogNames, Logs
from trainer.callbacks.base.run_protocol import run_detail
from trainer.core import arguments
from trainer.core.errors import see, wrong_type

Mode: TypeAlias = Literal["auto", "min", "max"]


class MonitorCallback(Callback):
    """Base of callbacks that check each epoch whether a log has improved.

    Args:
      monitor: name of the log, such as "val_loss".
      mode: "min" if less is better, "max" if more is better. "auto" uses the direction of the metric of that name, and
        "min" for a loss. Any other value warns and counts as "auto".
      baseline: initial value of `best`. With None, the first monitored value counts as an improvement.
      min_delta: minimum change that counts as an improvement; its sign is ignored.

    Attributes:
      monitor_op: `numpy.less` or `numpy.greater`; None before the end of the first epoch.
      best: best value so far.

    Raises:
      ValueError: from `fit`, if no log has the name `monitor`, or if `mode` is "auto" and the direction is unknown.

    Example:

    >>> callback = MonitorCallback("val_loss", mode="min", min_delta=0.1)
    >>> callback._set_monitor_op()
    >>> callback._is_improvement(0.45, 0.5), callback._is_improvement(0.35, 0.5)
    (False, True)
    """

    _monitor_checked = False

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: Mode = "auto",
        baseline: float | None = None,
        min_delta: float = 0,
    ):
        if not isinstance(monitor, str):
            raise wrong_type("monitor", monitor, "the name of a log, such as 'val_loss'")
        if not isinstance(mode, str):
            raise wrong_type("mode", mode, "'auto', 'min' or 'max'")
        arguments.require_finite(min_delta=min_delta)
        if baseline is not None:
            arguments.require_number(baseline=baseline)
        if mode not in ("auto", "min", "max"):
            warnings.warn(f"{type(self).__name__} mode '{mode}' is unknown, fallback to auto mode. Known modes: 'min', "
                          "'max' and 'auto'.", UserWarning, stacklevel=3)
            mode = "auto"
        self.monitor = monitor
        self.mode = mode
        self.best: Any = baseline
        self.min_delta = abs(min_delta)
        self.monitor_op: Any = None

    def check_monitor(self, available: Iterable[str]) -> None:
        """Rejects an unknown monitor. The loop calls this method as soon as it knows the names of the logs.

        Without this call, the first logs are checked and must contain the monitor. A loop that does not validate in
        every epoch therefore has to call it.

        Args:
          available: names of all logs that any epoch will have.

        Raises:
          ValueError: if `monitor` is not available; the message lists similar names.
        """
        available = sorted(set(available))
        if self.monitor not in available:
            raise ValueError(
                f"{type(self).__name__} received monitor={self.monitor!r}, which no log has. "
                f"{advice(self.monitor, available)} {see('monitor')}"
            )
        self._monitor_checked = True

    def check_log_names(self, names: LogNames) -> None:
        self.check_monitor(names.some_epochs)

    def get_monitor_value(self, logs: Mapping[str, Any] | None) -> Any:
        """Returns the monitored value, or None if the epoch has none (such as an epoch without a validation).

        Raises:
          ValueError: if these are the first logs, `check_monitor` was not called, and the monitor is missing.
        """
        logs = logs or {}
        if not self._monitor_checked:
            self.check_monitor(logs)
        return logs.get(self.monitor)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._monitor_checked = False  # the next fit may have other logs

    def _set_monitor_op(self) -> None:
        """Sets `monitor_op`, once; mode "auto" needs the model's metrics, which the first batch may build."""
        if self.monitor_op is not None:
            return
        directions = {"min": np.less, "max": np.greater}
        direction = self.mode if self.mode != "auto" else self._known_direction(self.monitor.removeprefix("val_"))
        if direction is None:
            raise ValueError(
                f"{type(self).__name__} callback received monitor={self.monitor}, and cannot automatically determine "
                "whether that metric should be maximized or minimized. Pass `mode='max'` in order to monitor based on "
                "the highest metric value, or pass `mode='min'` in order to use the lowest value."
            )
        self.monitor_op = directions[direction]

    def _known_direction(self, name: str) -> str | None:
        direction = run_detail(self.model, "metric_directions", {}).get(name)
        return "min" if direction is None and name.endswith("loss") else direction

    def _is_improvement(self, monitor_value: Any, reference_value: Any) -> bool:
        if reference_value is None:
            return True
        delta = -self.min_delta if self.monitor_op is np.less else self.min_delta
        return bool(self.monitor_op(_in_float32(monitor_value - delta), _in_float32(reference_value)))


def _in_float32(value: object) -> Any:
    # Keras compares in float32, the dtype of logs. With more digits, the binary form of `min_delta` would decide
    # whether 0.51 is better than 0.5 by 0.01.
    with np.errstate(over="ignore"):
        return np.float32(value) if isinstance(value, (float, np.floating)) else value


def advice(monitor: str, available: list[str], verb: str = "monitor") -> str:
    """Returns the sentence of an error message that suggests another log."""
    near = difflib.get_close_matches(monitor, available, n=3, cutoff=0.6)
    if monitor.startswith("val_") and not any(name.startswith("val_") for name in available):
        return f"Nothing is validated: pass `validation_data`, or {verb} one of: " + ", ".join(available) + "."
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    return f"Available: {', '.join(available)}."
