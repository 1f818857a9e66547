"""A callback that sends logs and parameters of a training to loggers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from trainer.callbacks.base.callback import Logs, adds_logs
from trainer.callbacks.base.late_logs_callback import LateLogsCallback
from trainer.callbacks.base.log_values import learning_rates, scalars
from trainer.callbacks.base.run_protocol import run_detail
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.callbacks.loggers.json_lines import JSONLines
from trainer.callbacks.loggers.logger import Logger, ResumableLogger
from trainer.callbacks.record.run_description import params_of
from trainer.core.arguments import as_count_or_word
from trainer.core.errors import wrong_type
from trainer.core.files import storage
from trainer.core.types import Phase


class LogTo(LateLogsCallback):
    """Sends the logs of each epoch, and optionally of batches, to loggers.

    Each epoch sends `loss`, `val_loss` and so on, and `learning_rate` if known. The step is the index of the epoch,
    from 0. With a number as `log_every`, every `log_every` batches send `batch_loss` and so on, the means of the epoch
    so far. The step is then the number of the batch in this `fit`, from 1, for epochs too, which add their index as
    `epoch`. A log with several values, such as one per class, is sent by value: `recall_0`, `recall_1`.

    The parameters are sent before the first logs: the arguments of `compile` and `fit`, the seed and the strategy.

    No step waits for this callback: logs of batches are read when the next execution has begun. With several processes,
    the first process sends. A resumed run continues the loggers' runs and files (see `ResumableLogger`). Loggers are
    finished also when an exception ends the training.

    An error of a logger before its first successful call ends the training, because its settings are wrong. A later
    error, for example of a lost server, only warns, once.

    Args:
      *loggers: `JSONLines`, `TensorBoardFiles`, `MLflow` and `WandB` of `trainer.callbacks.loggers`, or any `Logger`.
      log_every: "epoch", or a number of batches, which also limits the batches of an execution.
      params: additional parameters, such as the parameters of the module; they override the parameters above.

    Raises:
      TypeError: if an element is not a logger, or an argument has a wrong type.
      ValueError: without a logger, or if two loggers write the same file.

    Example:

    >>> from trainer.callbacks.loggers import JSONLines
    >>> log = LogTo(JSONLines("run/log.jsonl"), log_every=100, params={"width": 64})
    >>> history = model.fit(x, y, epochs=3, callbacks=[log])  # doctest: +SKIP
    """

    state_attributes = TrainBatchCallback.counters

    def __init__(self, *loggers: Logger, log_every: Literal["epoch"] | int = "epoch",
                 params: Mapping[str, Any] | None = None):
        if not loggers:
            raise ValueError("`LogTo` needs a logger, such as `LogTo(loggers.JSONLines(\"log.jsonl\"))`.")
        for logger in loggers:
            if isinstance(logger, type) or not isinstance(logger, Logger):
                raise wrong_type("loggers", logger, "instances with `log_metrics`, `log_params`, `log_artifact` and "
                                 "`finish`")
        _check_files_differ(loggers)
        if params is not None and not isinstance(params, Mapping):
            raise wrong_type("params", params, "a dict")
        self.loggers = loggers
        self.run_folder = next((folder for logger in loggers if (folder := getattr(logger, "folder", None))), None)
        self.log_every = as_count_or_word("log_every", log_every, ["epoch"])
        self.params_given = dict(params or {})
        self._reset()

    def _reset(self) -> None:
        self._all_params: dict[str, Any] = {}
        self._has_begun = False
        self._have_taken: set[int] = set()  # loggers, by their places
        self._have_failed: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        states = [logger.state_dict() if isinstance(logger, ResumableLogger) else None for logger in self.loggers]
        return {**super().state_dict(), "loggers": states if _is_chief() else [None] * len(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "loggers"})
        if len(state["loggers"]) != len(self.loggers):
            raise ValueError(f"`LogTo` has {len(self.loggers)} loggers. Expected, as in the run that resumes: "
                             f"{len(state['loggers'])}.")
        for logger, own in zip(self.loggers, state["loggers"], strict=True):
            if own is not None and _is_chief() and isinstance(logger, ResumableLogger):
                logger.load_state_dict(own)

    # --- the hooks -------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._reset()
        # Not sent yet: a resumed run loads its state after this hook.
        self._all_params = {**params_of(run_detail(self.model, "description", dict)()), **self.params_given}

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        super().next_sync_step(phase, batch)
        if phase != "train" or not isinstance(self.log_every, int):
            return None
        return batch + -self._number(batch) % self.log_every

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        self._begin()
        if isinstance(self.log_every, int) and self._number(last) % self.log_every == 0:
            super()._after_batches(first, last, logs)
        else:
            self.flush()

    def _read_logs(self, first: int, last: int, logs: Any) -> None:
        if _is_chief():
            self._log({f"batch_{name}": value for name, value in scalars(logs)}, self._number(last))

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not _is_chief() or not logs:
            return
        self._begin()
        values = dict(scalars(logs))
        for name, rate in learning_rates(self.model, known_only=True).items():
            values.setdefault(name, rate)  # a callback that logs the rate may have set that of the next epoch
        if isinstance(self.log_every, int):
            self._log({**values, "epoch": epoch}, self._number(self._last_batch))
        else:
            self._log(values, epoch)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._end(failed=False)

    def release(self) -> None:
        if self._has_begun:
            try:
                self.flush()
            except Exception as error:  # of the device, which has ended the training by another already
                warnings.warn(f"`LogTo` could not read the last logs: {error}", stacklevel=2)
            self._end(failed=True)

    # --- the loggers -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._has_begun and _is_chief():
            self._has_begun = True
            self._send(lambda logger: logger.log_params(self._all_params))

    def _log(self, values: dict[str, float], step: int) -> None:
        self._send(lambda logger: logger.log_metrics(values, step))

    def _end(self, failed: bool) -> None:
        if self._has_begun:
            self._has_begun = False
            self._send(lambda logger: logger.finish(failed), is_end=True)

    def _send(self, call: Callable[[Logger], None], is_end: bool = False) -> None:
        for place, logger in enumerate(self.loggers):
            if place in self._have_failed and not is_end:
                continue
            try:
                call(logger)
            except Exception as error:
                if place not in self._have_taken and not is_end:
                    raise
                if place not in self._have_failed:
                    warnings.warn(f"`{type(logger).__name__}` gets no more logs of this training, as it has failed: "
                                  f"{type(error).__name__}: {error}", stacklevel=2)
                self._have_failed.add(place)
            else:
                self._have_taken.add(place)


def _check_files_differ(loggers: tuple[Logger, ...]) -> None:
    files: set[str] = set()
    for logger in loggers:
        if isinstance(logger, JSONLines):
            file = storage.real(logger.path)
            if file in files:
                raise ValueError(f"`LogTo` has two loggers for the file {logger.path!r}. Give each a path of its own.")
            files.add(file)


def _is_chief() -> bool:
    return jax.process_index() == 0
