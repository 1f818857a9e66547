"""The progress output of fit, evaluate and predict.

Owns the content and the time of the output. Reading a log waits for the device, so logs are read a few times a second
at most. `terminal_line.py` and `notebook_line.py` draw the line, and `line.py` chooses between them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.callbacks.base.lazy_logs import begin_fetch
from trainer.callbacks.base.run_protocol import run_detail
from trainer.callbacks.progress.line import open_line
from trainer.callbacks.progress.notebook_line import NotebookLine
from trainer.callbacks.progress.pace import Pace
from trainer.callbacks.progress.printed_above import PrintedAbove
from trainer.callbacks.progress.progress_text import log_texts, remaining_text, step_duration_text, timing_text
from trainer.callbacks.progress.terminal_line import TerminalLine
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.arguments import check_verbose
from trainer.core.errors import wrong_type
from trainer.core.types import Phase

if TYPE_CHECKING:
    from rich.console import Console

_REDRAW_SECS = 0.25
_LINE_SECS = 30  # between whole lines; an execution that takes as long still leaves a line a minute


class ProgbarLogger(Callback):
    """Prints the progress and the logs of every epoch, of `evaluate` and of `predict`.

    With `verbose=1`, terminals and notebooks show a bar while batches run, with the steps, recent logs and the
    remaining time; its final state stays. A narrow terminal shows fewer timings, then no bar, but always all logs.
    Output of other code goes above the bar. The compilation time is shown with the epoch that it delayed, and a line at
    the end of `fit` summarizes the time. With `verbose=2`, or if the output is not a terminal (a pipe, a job's log,
    CI), each epoch prints a line to standard output, and a long epoch prints more, less than a minute apart. These
    lines go to `logging` after `trainer.utils.disable_interactive_logging()`. The progress of a validation inside `fit`
    is shown with the epoch.

    The callback overrides `on_execution_end` and no batch hook.

    Args:
      console: rich console of the bar; by default a console for standard output.

    Example:

    >>> bar = ProgbarLogger()
    >>> bar.set_params({"verbose": 2, "epochs": 3, "steps": 10})
    >>> bar.on_train_begin()
    >>> bar.on_epoch_begin(0)
    >>> bar.on_execution_end("train", 9)
    >>> bar.on_epoch_end(0, {"loss": 0.25})  # doctest: +ELLIPSIS
    Epoch 1/3 - 0s - ...s/step - loss: 0.2500
    """

    runs_on = "chief"
    stops_consistently = True

    def __init__(self, console: Console | None = None):
        if console is not None and not hasattr(console, "is_interactive"):
            raise wrong_type("console", console, "a `rich.console.Console`")
        self._console = console
        self._verbose = 1
        self._epochs = 1
        self._steps: int | None = None
        self._outermost: str | None = None  # the phase that was begun first: phases inside it are not shown
        self._has_executed = False
        self._title = ""
        self._pace = Pace()
        self._compiled_secs = 0.0  # that were shown already
        self._line: TerminalLine | NotebookLine | None = None
        self._printed_above: PrintedAbove | None = None
        self._validated: Pace | None = None  # the batches of the validation that runs inside of `fit`
        self._validation_steps: int | None = None
        self._line_printed_at = 0.0
        self._late_logs: Mapping[str, Any] | None = None  # of the execution before, where they are to be shown
        self._log_texts: list[str] = []  # the shown texts
        self._logs_shown_at = float("-inf")

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Sets the verbosity, the number of epochs and the number of steps in an epoch, and resets the display.

        Raises:
          ValueError: if "verbose" is none of 0, 1, 2 and "auto" (1).
        """
        super().set_params(params)
        self._verbose = check_verbose(params.get("verbose", 1))
        self._epochs = params.get("epochs", 1)
        self._steps = params.get("steps")
        self._outermost = None  # an exception may have ended the last run
        self._compiled_secs = 0.0
        self._validation_steps = None
        self.release()
        self._line = None

    def release(self) -> None:
        """Restores `sys.stdout`, and ends the line of a bar that an exception has interrupted."""
        if isinstance(self._line, TerminalLine):
            self._line.end()
        if self._printed_above is not None:
            self._printed_above.end()
            self._printed_above = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._outermost = "train"
        self._has_executed = False

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._outermost = None
        timing = self._timing()
        if self._verbose == 1 and timing:
            show = self._line.write if isinstance(self._line, NotebookLine) else print_message
            show(timing_text(timing))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._begin(f"Epoch {epoch + 1}/{self._epochs}")

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._end(logs or {})

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._validated = Pace() if self._outermost == "train" else None
        self._begin_unless_inside("test", "Evaluate")

    def on_test_end(self, logs: Logs | None = None) -> None:
        if self._validated is not None:
            self._validation_steps, self._validated = self._validated.step or None, None
        self._end_unless_inside("test", logs or {})

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._begin_unless_inside("predict", "Predict")

    def on_predict_end(self, logs: Logs | None = None) -> None:
        self._end_unless_inside("predict", {})  # the logs of predict are its outputs

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        if phase == "test" and self._validated is not None:
            self._validated.reach(batch + 1)
        elif phase == self._outermost:
            self._pace.reach(batch + 1)
            self._has_executed = True
        else:
            return
        if self._line is None:
            self._print_progress(logs if phase == self._outermost and phase != "predict" else None)
        elif phase == self._outermost:
            self._draw_progress(self._line, phase, logs)
        elif time.perf_counter() - self._logs_shown_at >= _REDRAW_SECS:
            self._logs_shown_at = time.perf_counter()
            self._draw(self._line, self._log_texts, self._validation())

    def _print_progress(self, logs: Logs | None) -> None:
        if self._verbose and time.perf_counter() - self._line_printed_at >= _LINE_SECS:
            texts = [f"{self._pace.step}/{self._steps or '?'}", *self._validation(), *self._remaining(),
                     *log_texts(logs or {})]
            self._line_printed_at = time.perf_counter()
            print_message(" - ".join([self._title, *texts]))

    def _draw_progress(self, line: TerminalLine | NotebookLine, phase: Phase, logs: Logs | None) -> None:
        late_logs, self._late_logs = self._late_logs, None
        if time.perf_counter() - self._logs_shown_at < _REDRAW_SECS:
            return
        # Logs are drawn when the next execution has begun, so that the device has work while the host waits for them.
        self._late_logs = {} if phase == "predict" else logs or {}
        begin_fetch(self._late_logs)
        if late_logs is not None:
            self._log_texts = log_texts(late_logs)
            self._logs_shown_at = time.perf_counter()
        self._draw(line, self._log_texts, [*self._remaining(), *self._compilation(), *self._step_duration()])

    def _begin_unless_inside(self, phase: str, title: str) -> None:
        if self._outermost is None:
            self._outermost = phase
            self._has_executed = False
            self._begin(title)

    def _end_unless_inside(self, phase: str, logs: Mapping[str, Any]) -> None:
        if self._outermost == phase:
            self._end(logs)
            self._outermost = None

    def _begin(self, title: str) -> None:
        self._title = title
        self._pace = Pace()
        self._late_logs, self._log_texts, self._validated = None, [], None
        self._line_printed_at = time.perf_counter()
        self._line = self._new_line() if self._verbose == 1 else None
        if self._line is not None:
            self._draw(self._line, [], [] if self._has_executed else ["compiling..."])
            # The first logs of a run are drawn at once.
            self._logs_shown_at = time.perf_counter() if self._has_executed else float("-inf")

    def _end(self, logs: Mapping[str, Any]) -> None:
        self._late_logs = None  # they may hold on to the model
        if not self._verbose:
            return
        texts = log_texts(logs)  # before the clock is read: fetching the logs waits for the last step
        timings = [f"{self._pace.elapsed_secs():.0f}s", *self._compilation(), *self._step_duration()]
        self._compiled_secs = self._timing().get("compile", 0.0)
        if self._steps is None:
            self._steps = self._pace.step  # the next epochs probably have as many steps
        if self._line is not None:
            self._draw(self._line, texts, timings, final=True)
            self.release()
        else:
            print_message(" - ".join([self._title, *timings, *texts]))

    def _draw(
        self, line: TerminalLine | NotebookLine, logs: list[str], timings: list[str], final: bool = False
    ) -> None:
        line.draw(self._title, self._pace.step, self._steps, logs, timings, final)

    def _validation(self) -> list[str]:
        return [] if self._validated is None else [
            f"validation {self._validated.step}/{self._validation_steps or '?'}"]

    def _step_duration(self) -> list[str]:
        # Compiling may be a part of the time of all steps, where one execution has most of them.
        if not self._pace.step or self._compile_secs() > self._pace.elapsed_secs() / 2:
            return []
        return [step_duration_text(self._pace.secs_per_step())]

    def _timing(self) -> Mapping[str, float]:
        timing = run_detail(self.model, "timing")
        return {} if timing is None else timing.report()

    def _compile_secs(self) -> float:
        return self._timing().get("compile", 0.0) - self._compiled_secs

    def _compilation(self) -> list[str]:
        secs = self._compile_secs()
        return [f"compiled in {secs:.1f}s"] if secs >= 0.05 else []

    def _remaining(self) -> list[str]:
        if not self._steps or not self._pace.step or self._validated is not None:
            return []
        return ["ETA " + remaining_text(self._pace.secs_per_step() * max(self._steps - self._pace.step, 0))]

    def _new_line(self) -> TerminalLine | NotebookLine | None:
        """Returns a line to draw; None if only whole lines should be printed."""
        if isinstance(self._line, NotebookLine):  # all epochs are in one output
            return self._line
        line = open_line(self._console)
        if isinstance(line, TerminalLine) and self._console is None:
            self._printed_above = PrintedAbove(line)
        return line
