"""The way from `Model.fit` to a compiled step, traced: `python -m tests.support.way_to_a_step` draws it.

CONTRIBUTING shows both drawings: a second `fit`, whose program exists, up to its first step and after it, and how a
first `fit` traces and compiles the program. They have the functions of `SECOND` and `FIRST`, at the places where the
trace finds them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

import trainer

ROOT = os.path.dirname(trainer.__file__) + os.sep
SECOND = (
    "Model.fit", "training_readers", "adapt", "callback_list", "fit", "start_phase", "Reader.peek",
    "ModelCore.prepared_phase", "ModelCore._traced_phase", "CompiledPhase.trace", "RunningPhase.place_arrays",
    "TrainingRun.begin_or_resume", "_run_epoch",
    "RunningPhase.groups", "Reader.read", "_executions", "RunningPhase.stacks", "Reader._read_arrays",
    "Dataset.index_block", "HostArrays.gather", "RunningPhase._to_devices", "Strategy.place_group", "_execute",
    "CompiledPhase.executable", "Programs.get", "StateHolder.take_for_donation", "CompiledPhase._run",
    "StateHolder.set", "_queue", "RunningPhase.lazy_logs", "CallbackList.on_execution_end", "TrainingRun.trained",
    "TrainingRun._offer_save_point", "TrainingRun.epoch_trained", "CallbackList.on_epoch_end",
    "TrainingRun.epoch_ended")
FIRST = (
    "ModelCore.prepared_phase", "StateHolder.building", "ModelCore._traced_phase", "CompiledPhase.trace",
    "StepFunctions.traced_step", "StepFunctions._one_batch", "train_one_batch", "OverridableSteps.train_step",
    "OverridableSteps.apply", "LinenFunctional.apply", "OverridableSteps.compute_loss",
    "OverridableSteps.compute_metrics", "CompiledMetrics.values", "TrainState.apply_gradients",
    "CompiledPhase._learn_logs", "affordable_steps", "_execute", "CompiledPhase.executable", "Programs.get",
    "Programs.lowered", "StepFunctions._function", "StepFunctions._compiled_function", "StepFunctions._execution",
    "train_group", "add_step")


class Call(NamedTuple):
    """A call of a function of the trainer.

    Attributes:
      above: the functions of the trainer on the stack above it, from the top.
      function: its qualified name.
      file: its file, below the package's folder.
      precedes_step: whether no step has run before.
    """

    above: tuple[str, ...]
    function: str
    file: str
    precedes_step: bool


def traced(fit: Callable[[], Any]) -> list[Call]:
    """Returns the calls of a `fit`, in their order."""
    calls: list[Call] = []
    has_begun = False

    def ours(frame):
        code = frame.f_code
        return code.co_filename.startswith(ROOT) and "<" not in code.co_qualname.rpartition(".")[2]

    def above(frame) -> Iterator[Any]:
        while (frame := frame.f_back) is not None:
            if ours(frame):
                yield frame

    def observe(frame, event, _):
        nonlocal has_begun
        if event != "call":
            return
        # Finalizers run whenever the devices let go of memory.
        if ours(frame) and all(each.f_code.co_name != "__del__" for each in (frame, *above(frame))):
            file = frame.f_code.co_filename.removeprefix(ROOT).replace(os.sep, "/")
            names = tuple(each.f_code.co_qualname for each in above(frame))
            calls.append(Call(names[::-1], frame.f_code.co_qualname, file, not has_begun))
        elif frame.f_code.co_qualname.endswith("Compiled.__call__"):  # other programs than the step's run, too
            has_begun |= any(each.f_code.co_qualname == "CompiledPhase._run" for each in above(frame))

    sys.setprofile(observe)
    try:
        fit()
    finally:
        sys.setprofile(None)
    return calls


def of_two_fits() -> tuple[list[Call], list[Call]]:
    """Returns the calls of a first and of a second `fit` of three layers."""
    model = trainer.Sequential([nn.Dense(16), nn.relu, nn.Dense(16), nn.relu, nn.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])
    x, y = np.ones((64, 8), np.float32), np.ones((64, 3), np.float32)

    def fit():
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)

    # Else the second `fit` finds the buffers of the first at times, and makes new ones at others.
    gc.disable()
    try:
        first = traced(fit)
        jax.block_until_ready(jax.live_arrays())
        return first, traced(fit)
    finally:
        gc.enable()


def drawn(calls: list[Call], shown: tuple[str, ...]) -> str:
    """Returns the tree of the calls of some functions, each once below its caller, with their files."""
    rows: dict[tuple[str, ...], str] = {}
    for call in calls:
        if call.function in shown:
            rows.setdefault((*[name for name in call.above if name in shown], call.function), call.file)
    lines = [("  " * (len(way) - 1) + way[-1], file) for way, file in rows.items()]
    width = max(len(text) for text, _ in lines) + 2
    return "\n".join(f"{text:<{width}}{file}" for text, file in lines)


if __name__ == "__main__":
    first, second = of_two_fits()
    before = [call for call in second if call.precedes_step]
    files, on_stack = {call.file for call in before}, len(before[-1].above) + 1
    print(f"{len(before)} calls in {len(files)} files before the step, {on_stack} on the stack")
    print(drawn(second, SECOND))
    print()
    print(drawn(first, FIRST))
