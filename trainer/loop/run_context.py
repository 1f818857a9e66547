"""The clock of the run that a model is in, and its validation: what can be known of a run from outside.

Owns how a run inside of another one, such as an `evaluate` that a callback calls, counts for the outer run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.cluster import watchdog
from trainer.core.timing import Timing


class RunContext:
    """What there is to know of the present run of a model, or of its last.

    Attributes:
      timing: the clock of the run.
      sets: the names of the sets that it evaluates on; one that has no name is "".
      validator: while a `fit` with validation data runs, the function that evaluates on them; else None.
      describe: while a `fit` runs, the function that returns what it was given and its data, as plain data; else None.
    """

    def __init__(self) -> None:
        self.timing = Timing()
        self.timing.end()
        self.validator: Callable[[], dict[str, Any]] | None = None
        self.sets: Sequence[str] = ()
        self.describe: Callable[[], dict[str, Any]] | None = None

    def check_is_idle(self, fix: str) -> None:
        """Raises RuntimeError while a run lasts; `fix` says what to do later."""
        if self.timing.is_running:
            raise RuntimeError("The model is running, with a step that was compiled as `compile` said before. "
                               f"{fix} when `fit` has ended; `model.stop_training = True` ends it.")

    @contextlib.contextmanager
    def timed(self, timing: Timing | None = None) -> Iterator[Timing]:
        """Gives a run a clock of its own while a block lasts; the end of an inner run gives the outer clock back."""
        outer = self.timing
        timing = self.timing = timing or Timing()
        observer = watchdog()
        if observer is not None:
            timing.on_phase = lambda phase: observer.progress(timing.steps, phase)
            timing.on_phase("host")
        try:
            yield timing
        finally:
            timing.end()
            if observer is not None:
                observer.progress(timing.steps, "host" if outer.is_running else "idle")
            if outer.is_running:
                outer.inner_secs += timing.report()["total"]
                self.timing = outer

    @contextlib.contextmanager
    def validating(self, validator: Callable[[], dict[str, Any]] | None, sets: Sequence[str]) -> Iterator[None]:
        """Lets callbacks validate while a block lasts."""
        outer, self.validator, self.sets = (self.validator, self.sets), validator, sets
        try:
            yield
        finally:
            self.validator, self.sets = outer

    @contextlib.contextmanager
    def described(self, describe: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Lets callbacks ask what the run was given while a block lasts."""
        outer, self.describe = self.describe, describe
        try:
            yield
        finally:
            self.describe = outer
