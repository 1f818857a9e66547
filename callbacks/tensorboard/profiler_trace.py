"""A trace of JAX's profiler over some train steps, as TensorBoard shows it.

Owns the starting and stopping of the profiler, of which a process has a single instance. When to do so is what
callbacks decide.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax


class ProfilerTrace:
    """A trace that only the first of several processes makes, and whose failure only warns.

    A training is worth more than its profile.

    Args:
      owner: the name of the callback, for warnings.

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
        """Begins to record; into `directory`, where TensorBoard looks for profiles."""
        if jax.process_index() == 0:
            try:
                jax.profiler.start_trace(directory)
                self.is_running = True
            except (OSError, RuntimeError) as error:
                warnings.warn(f"`{self._owner}` cannot start to profile: {error}", stacklevel=2)

    def stop(self) -> None:
        """Ends the step, stops recording and writes what was recorded; does nothing if nothing is."""
        self.end_step()
        if self.is_running:
            self.is_running = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                warnings.warn(f"`{self._owner}` cannot write the profile: {error}", stacklevel=2)

    def begin_step(self, number: int) -> None:
        """Marks what the host does from here on as the train step of a number."""
        if self.is_running:
            self._step = jax.profiler.StepTraceAnnotation("train", step_num=number)
            self._step.__enter__()

    def end_step(self) -> None:
        """Ends the step that was begun, if any."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
