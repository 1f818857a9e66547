"""Profiles of train batches."""

from __future__ import annotations

import os

import jax

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.run_protocol import Run
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.callbacks.tensorboard.profiler_trace import ProfilerTrace, checked_batches
from trainer.core.arguments import as_path
from trainer.core.errors import wrong_type
from trainer.core.types import Phase


class Profile(TrainBatchCallback):
    """Records a profile of some train batches with JAX's profiler; `tensorboard --logdir=LOG_DIR` shows it.

    Batches stay fused, also within the profile, so that it shows the real training. Executions end, and the host waits
    for the device, only before the first batch and after the last batch, so that the profile has exactly these batches.
    The first batches of a `fit` compile: choose later batches. Events between two epochs, such as a validation, are in
    the profile if it has batches of both epochs.

    A profile that is incomplete when `fit` ends, also by an exception, is written then, or at the latest at the next
    use of the callback. With several processes, the first process records. If the profiler fails, for example during
    another profile, the callback warns and training continues.

    Args:
      log_dir: directory of the profile; created if missing.
      steps: numbers of the first and the last train batch, counted from 1 over the epochs of this `fit`; a resumed run
        counts from 1 again.

    Raises:
      ValueError: if `steps` is not such a pair.

    Example:

    >>> import pathlib, tempfile, types
    >>> directory = tempfile.mkdtemp()
    >>> profile = Profile(directory, steps=(3, 4))
    >>> profile.set_model(types.SimpleNamespace(current_run=types.SimpleNamespace(state=None)))
    >>> profile.on_train_begin()
    >>> profile.on_epoch_begin(0)
    >>> for batch in (0, 2, 4):
    ...     last = profile.next_sync_step("train", batch)
    ...     print(f"An execution that begins with {batch} must end with {last}.")
    ...     profile.on_execution_end("train", last or 7, {})
    An execution that begins with 0 must end with 1.
    An execution that begins with 2 must end with 3.
    An execution that begins with 4 must end with None.
    >>> len(list(pathlib.Path(directory).glob("plugins/profile/*/*.xplane.pb")))
    1
    """

    def __init__(self, log_dir: str | os.PathLike[str], steps: tuple[int, int]):
        expected = "the numbers of the first and the last batch to profile, counted from 1"
        if not isinstance(steps, (tuple, list)):
            raise wrong_type("steps", steps, expected)
        self.log_dir = as_path("log_dir", log_dir, "the path of a folder")
        self.first, self.last = checked_batches("steps", steps, expected)
        self._trace = ProfilerTrace(type(self).__name__)

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        self._trace.stop()  # an exception may have ended the last fit

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._trace.stop()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        number = self._number(0)
        self._trace.end_step()
        if number == self.first:
            self._start()
        elif self._trace.is_running:
            self._trace.begin_step(number)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._trace.end_step()  # a validation is none

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        super().next_sync_step(phase, batch)
        number = self._number(batch)
        if phase != "train" or number > self.last:
            return None
        return batch + (self.first - 1 if number < self.first else self.last) - number

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        number = self._number(last)
        self._trace.end_step()
        if self._trace.is_running and number >= self.last:
            self._wait()
            self._trace.stop()
        elif self._trace.is_running:
            self._trace.begin_step(number + 1)
        elif number == self.first - 1 and not self._is_last_of_epoch(last):
            self._wait()
            self._start()

    def _wait(self) -> None:
        jax.block_until_ready(self.model.current_run.state)

    def _is_last_of_epoch(self, batch: int) -> bool:
        # The beginning of the next epoch then starts the trace, after the validation.
        return (self.params or {}).get("steps") == batch + 1

    def _start(self) -> None:
        self._trace.start(self.log_dir)
        self._trace.begin_step(self.first)
