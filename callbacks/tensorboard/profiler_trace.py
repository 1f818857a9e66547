"""A trace of JAX's profiler over some train steps, for TensorBoard.

Owns the start and stop of the profiler, which has a single instance per process. Callbacks decide when to call them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from trainer.core.arguments import as_count


class ProfilerTrace:
    """A trace that is recorded by the first process only; failures only warn, so that training continues.

    Args:
      owner: name of the callback, for warnings.

    Attributes:
      is_running: whether it is recording.

    Example:

    >>> import pathlib, tempfile
    >>> directory, trace = tempfile.mkdtemp(), ProfilerTrace("Mine")
    >>> trace.start(directory)
    >>> trace.begin_step(1)
    >>> trace.stop()
    >>> len(list(pathlib.Path(directory).glob("plugins/profile/*/*.xplane.pb")))
    1
    """

    def __init__(self, owner: str):
        self.is_running = False
        self._owner = owner
        self._step: Any = None

    def start(self, directory: str) -> None:
        """Starts recording to `directory`, where TensorBoard looks for profiles."""
        if jax.process_index() == 0:
            try:
                jax.profiler.start_trace(directory)
                self.is_running = True
            except (OSError, RuntimeError) as error:
                warnings.warn(f"`{self._owner}` cannot start to profile: {error}", stacklevel=2)

    def stop(self) -> None:
        """Ends the step and the recording, and writes the trace; does nothing if nothing is recorded."""
        self.end_step()
        if self.is_running:
            self.is_running = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                warnings.warn(f"`{self._owner}` cannot write the profile: {error}", stacklevel=2)

    def begin_step(self, number: int) -> None:
        """Marks the start of a train step with this number."""
        if self.is_running:
            self._step = jax.profiler.StepTraceAnnotation("train", step_num=number)
            self._step.__enter__()

    def end_step(self) -> None:
        """Ends the current step, if any."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


def checked_batches(argument: str, value: Sequence[object], expected: str) -> tuple[int, int]:
    """Returns the numbers of the first and the last batch to profile, counted from 1.

    Raises:
      TypeError: if an element is not a whole number.
      ValueError: if `value` is not such a pair.
    """
    numbers = [as_count(argument, number, 1, expected) for number in value]
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={value!r}.")
    return numbers[0], numbers[1]
