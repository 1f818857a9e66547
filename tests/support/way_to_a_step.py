"""The way from `Model.fit` to a compiled step, traced: `python -m tests.support.way_to_a_step` draws it.

CONTRIBUTING shows the drawing. It has the functions on the stack at the step, and those that make many calls.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn

import trainer

ROOT = os.path.dirname(trainer.__file__) + os.sep
MANY_CALLS = 8


class Call(NamedTuple):
    """A call of a function of the trainer.

    Attributes:
      depth: how many functions of the trainer are on the stack above it.
      function: its qualified name.
      file: its file, below the package's folder.
      is_on_stack: whether it has not returned when the step begins.
    """

    depth: int
    function: str
    file: str
    is_on_stack: bool = False


def traced() -> list[Call]:
    """Returns the calls of a second `fit` of three layers before its first step, in their order."""
    model = trainer.Sequential([nn.Dense(16), nn.relu, nn.Dense(16), nn.relu, nn.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])
    x, y = np.ones((64, 8), np.float32), np.ones((64, 3), np.float32)
    # Else the second `fit` finds the buffers of the first at times, and makes new ones at others.
    gc.disable()
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    jax.block_until_ready(jax.live_arrays())
    calls: list[tuple[Call, object]] = []
    stack: list[object] = []

    def ours(frame):
        code = frame.f_code
        return code.co_filename.startswith(ROOT) and "<" not in code.co_qualname.rpartition(".")[2]

    def above(frame):
        while (frame := frame.f_back) is not None:
            if ours(frame):
                yield frame

    def observe(frame, event, _):
        if event != "call" or stack:
            return
        # Finalizers run whenever the devices let go of memory.
        if ours(frame) and all(each.f_code.co_name != "__del__" for each in (frame, *above(frame))):
            file = frame.f_code.co_filename.removeprefix(ROOT).replace(os.sep, "/")
            calls.append((Call(len(list(above(frame))), frame.f_code.co_qualname, file), frame))
        elif frame.f_code.co_qualname.endswith("Compiled.__call__") and any(
                each.f_code.co_name == "_execute" for each in above(frame)):  # other programs than the step's run, too
            stack.extend(above(frame))

    sys.setprofile(observe)
    try:
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    finally:
        sys.setprofile(None)
        gc.enable()
    return [call._replace(is_on_stack=any(frame is each for each in stack)) for call, frame in calls]


def drawn(calls: list[Call]) -> str:
    """Returns the picture: a tree of the calls that are on the stack, or make at least `MANY_CALLS` themselves."""
    shown: list[Call] = []
    for number, call in enumerate(calls):
        inside = next((index for index, other in enumerate(calls[number + 1:]) if other.depth <= call.depth),
                      len(calls) - number - 1)
        if call.is_on_stack or inside >= MANY_CALLS:
            shown.append(call)
    width = max(2 * call.depth + len(call.function) for call in shown) + 2
    return "\n".join(f"{'  ' * call.depth + call.function:<{width}}{call.file}" + "  *" * call.is_on_stack
                     for call in shown)


if __name__ == "__main__":
    found = traced()
    print(f"{len(found)} calls in {len({call.file for call in found})} files")
    print(drawn(found))
