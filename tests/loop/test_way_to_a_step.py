"""The way from `Model.fit` to a compiled step, which CONTRIBUTING draws: few calls, over few files.

A contributor who wants to know what happens reads these functions. Checks, properties and what the user's data and
callbacks do in between are not among them.
"""

import os
import sys

import numpy as np
import pytest
from flax import linen as nn

import trainer

ROOT = os.path.dirname(trainer.__file__) + os.sep
# In the order of their first calls.
WAY = [
    ("model/model.py", "Model.fit"),
    ("model/inputs.py", "training_readers"),
    ("data/adapt.py", "adapt"),
    ("data/reader.py", "Reader.__init__"),
    ("model/inputs.py", "callback_list"),
    ("loop/loop.py", "fit"),
    ("loop/phase_input.py", "start_phase"),
    ("data/reader.py", "Reader.peek"),
    ("model/loop_model.py", "LoopModel.prepared_phase"),
    ("step/compiled_phase.py", "CompiledPhase.prepare"),
    ("model/loop_model.py", "LoopModel.place_arrays"),
    ("loop/loop.py", "_run_epoch"),
    ("loop/phase_input.py", "PhaseInput.groups"),
    ("data/reader.py", "Reader.read"),
    ("loop/loop.py", "_executions"),
    ("distribute/strategies/strategy.py", "Strategy.place_group"),
    ("loop/loop.py", "_execute"),
    ("step/compiled_phase.py", "CompiledPhase.executable"),
    ("model/state_holder.py", "StateHolder.take"),
    ("step/compiled_phase.py", "CompiledPhase._run"),
]
# What is on the stack when the executable is called: where a debugger stops, and what a traceback shows.
STACK = [
    ("compile/entry_points.py", "entry_point.<locals>.call"),
    ("model/model.py", "Model.fit"),
    ("loop/loop.py", "fit"),
    ("loop/loop.py", "_run_epoch"),
    ("loop/loop.py", "_execute"),
    ("step/compiled_phase.py", "CompiledPhase._run"),
    ("distribute/placement/device_memory.py", "retried"),
]


@pytest.fixture(scope="module")
def observed():
    """Returns the calls of the trainer up to the first train step of a second `fit`, and the stack at that moment."""
    model = trainer.Model(nn.Dense(3))
    model.compile("sgd", "mse")
    x, y = np.ones((64, 8), np.float32), np.ones((64, 3), np.float32)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    calls, stacks = [], []

    def is_ours(code):
        return code.co_filename.startswith(ROOT)

    def named(code):
        return code.co_filename.removeprefix(ROOT).replace(os.sep, "/"), code.co_qualname

    def observe(frame, event, _):
        if event != "call" or stacks:
            return
        if is_ours(frame.f_code):
            calls.append(named(frame.f_code))
        elif frame.f_code.co_qualname.endswith("Compiled.__call__"):
            stack, caller = [], frame.f_back
            while caller is not None:
                if is_ours(caller.f_code):
                    stack.insert(0, named(caller.f_code))
                caller = caller.f_back
            if any(function == "_execute" for _, function in stack):  # other programs than the step's run, too
                stacks.append(stack)

    sys.setprofile(observe)
    try:
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    finally:
        sys.setprofile(None)
    return calls, stacks


def test_few_frames_are_on_the_stack_when_a_step_runs(observed):
    assert observed[1] == [STACK]


def test_the_way_is_short_and_is_the_one_that_is_drawn(observed):
    first = list(dict.fromkeys(observed[0]))
    assert [call for call in first if call in WAY] == WAY
    assert len(WAY) <= 20
    assert len({file for file, _ in WAY}) <= 10
