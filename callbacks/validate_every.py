"""Validation in the middle of epochs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.run_protocol import run_detail
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.callbacks.progress.progress_text import log_texts
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.errors import wrong_type
from trainer.core.types import Data, Phase, Verbose


class ValidateEvery(TrainBatchCallback):
    """Validates after a number of train batches or minutes, at any point of an epoch.

    Training is unaffected: the weights and the logs of the epoch are the same with and without this callback. `fit`
    still validates at the end of epochs.

    Args:
      steps: number of train batches between validations, counted over the epochs of a `fit`. Batches in between stay
        fused.
      minutes: minutes between the beginning of `fit` or the end of the last validation and the next validation, which
        follows the running execution. Give either `minutes` or `steps`.
      validation_data: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays, or batches that can be iterated again, or
        a dict of such sets by name, as in `evaluate`; None for the `validation_data` of `fit`. A `Dataset` of arrays
        may stay on the devices between validations; other data are sent each time.
      verbose: 1 to print a line for each validation, 0 for no messages.

    Attributes:
      history: "step", the numbers of the train batches, from 1, before each validation; and for each log of the
        validations, such as "val_loss", the list of its values. Cleared when `fit` begins.
      last_logs: logs of the last validation, with the prefix "val_"; empty before the first validation.

    A resumed run validates after the same batches as an uninterrupted run; with `minutes`, at about the same training
    time.

    Raises:
      ValueError: unless exactly one of `steps` and `minutes` is given, and positive; for validation data that can be
        read only once; from `fit`, if neither this callback nor `fit` has `validation_data`, or for `minutes` in a run
        of several processes, whose clocks differ.
      TypeError: if `steps` is not an integer, or `minutes` is not a number.

    Example:

    >>> import types
    >>> every = ValidateEvery(2, verbose=1)
    >>> every.set_model(types.SimpleNamespace(validate=lambda: {"loss": 0.5}))
    >>> every.on_train_begin()
    >>> for batch in range(4):
    ...     every.on_execution_end("train", batch, {})
    <BLANKLINE>
    Step 2: val_loss: 0.5000
    <BLANKLINE>
    Step 4: val_loss: 0.5000
    >>> every.history
    {'step': [2, 4], 'val_loss': [0.5, 0.5]}
    """

    state_attributes = (*TrainBatchCallback.counters, "history", "last_logs", "_secs_waited")

    def __init__(
        self, steps: int | None = None, minutes: float | None = None, *, validation_data: Data | None = None,
        verbose: Verbose = 0,
    ):
        if (steps is None) == (minutes is None):
            raise ValueError("`ValidateEvery` takes either `steps` or `minutes`. Received: "
                             f"steps={steps!r}, minutes={minutes!r}.")
        arguments.check_count("steps", steps, optional=True)
        if minutes is not None:
            arguments.require_positive(minutes=minutes)
        if isinstance(validation_data, (tuple, list)) and len(validation_data) not in (2, 3):
            raise ValueError("`validation_data` must be `(x, y)`, `(x, y, sample_weight)` or an iterable of batches. "
                             f"Received: a {type(validation_data).__name__} of {len(validation_data)}.")
        for data in validation_data.values() if isinstance(validation_data, Mapping) else [validation_data]:
            if data is not None and not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
                raise wrong_type("validation_data", data, "`(x, y)`, `(x, y, sample_weight)` or batches")
            if isinstance(data, Iterator):
                raise ValueError("`validation_data` must be data that can be iterated again for each validation. "
                                 f"Received: a {type(data).__name__}, which yields its batches once.")
        self.steps = None if steps is None else int(steps)
        self.minutes = None if minutes is None else float(minutes)
        self.validation_data = validation_data
        self.verbose = arguments.check_verbose(verbose)
        self._reset()

    def _reset(self) -> None:
        self.history: dict[str, list[Any]] = {"step": []}
        self.last_logs: dict[str, Any] = {}
        self._wait_begin = time.perf_counter()

    @property
    def _secs_waited(self) -> float | None:
        """Seconds since the last validation; None where they decide nothing, so that equal runs have equal states."""
        return None if self.minutes is None else time.perf_counter() - self._wait_begin

    @_secs_waited.setter
    def _secs_waited(self, secs: float | None) -> None:
        self._wait_begin = time.perf_counter() - (secs or 0.0)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        if self.minutes is not None and jax.process_count() > 1:
            raise ValueError("`ValidateEvery(minutes=...)` cannot be used in a run of several processes: all of them "
                             "must validate after the same batch, and their clocks differ. Use `steps`.")
        # A custom training loop may not report whether it can validate.
        if self.validation_data is None and not run_detail(self.model, "has_validation_data", True):
            raise ValueError("`ValidateEvery` has nothing to validate on. Pass `validation_data`, to it or to `fit`.")
        self._reset()

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        super().next_sync_step(phase, batch)
        if phase != "train" or self.steps is None:
            return None
        return batch + -self._number(batch) % self.steps

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        number, waited = self._number(last), self._secs_waited
        if self.steps is not None:
            is_due = number % self.steps == 0
        else:
            is_due = waited is not None and self.minutes is not None and waited >= 60 * self.minutes
        if is_due:
            self._validate(number, logs)

    def _validate(self, step: int, logs: Logs | None) -> None:
        dict(logs or {})  # waits for the train steps, whose time would else count as the callback's
        self.last_logs = {f"val_{name}": value for name, value in self._evaluated().items()}
        for name, value in {"step": step, **self.last_logs}.items():
            self.history.setdefault(name, []).append(value)
        if self.verbose > 0:
            print_message(f"\nStep {step}: {' - '.join(log_texts(self.last_logs))}")
        self._wait_begin = time.perf_counter()

    def _evaluated(self) -> dict[str, Any]:
        data = self.validation_data
        if data is None:
            return self.model.validate()
        if not isinstance(data, (tuple, list)):
            return self.model.evaluate(data, verbose=0)
        x, y, *sample_weight = data
        return self.model.evaluate(x, y, verbose=0, **dict(zip(["sample_weight"], sample_weight, strict=False)))
