"""The ways from `Model.fit` to a step and to the module, traced: `python -m tests.support.way_to_a_step` draws them.

CONTRIBUTING shows both drawings. The first, of a second `fit`, has the functions on the stack at the step, and those
that make many calls. The other is the stack of a first `fit` at the call of the module, while the step is traced.
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
MANY_CALLS = 7


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


def stack_at_module() -> list[Call]:
    """Returns the functions of the trainer on the stack when a first `fit` differentiates the module, from the top."""
    stack: list[Call] = []

    class Probe(nn.Module):
        @nn.compact
        def __call__(self, x):
            frames, frame = [], sys._getframe()
            while (frame := frame.f_back) is not None:
                frames.append(frame)
            names = [each.f_code.co_qualname for each in frames]
            if "train_one_batch" in names and not stack:
                ours = [each.f_code for each in reversed(frames) if each.f_code.co_filename.startswith(ROOT)]
                stack.extend(Call(depth, code.co_qualname, code.co_filename.removeprefix(ROOT).replace(os.sep, "/"))
                             for depth, code in enumerate(ours))
            return nn.Dense(3)(x)

    model = trainer.Model(Probe())
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((64, 8), np.float32), np.ones((64, 3), np.float32), batch_size=32, verbose=0)
    return stack


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


def drawn_stack(stack: list[Call]) -> str:
    """Returns a line for each function of a stack, without closures, from `prepared_phase` to the first of a module."""
    names = [call.function for call in stack]
    first = names.index("ModelCore.prepared_phase")
    last = next(index for index, call in enumerate(stack) if call.file.startswith("core/modules/"))
    shown = [call for call in stack[first:last + 1] if "<locals>" not in call.function]
    width = max(len(call.function) for call in shown) + 2
    return "\n".join(f"{call.function:<{width}}{call.file}" for call in shown)


if __name__ == "__main__":
    found = traced()
    print(f"{len(found)} calls in {len({call.file for call in found})} files")
    print(drawn(found))
    print()
    print(drawn_stack(stack_at_module()))
