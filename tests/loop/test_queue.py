"""How many executions the loop queues before it waits, and the batches that processes agree on before."""

import collections
import contextlib
import types

import pytest

from trainer.core.timing import Timing
from trainer.engine.loop import loop

GROUP = types.SimpleNamespace(count=32)


class Logs:
    """Running logs that tell which executions were waited for."""

    def __init__(self, number, waited):
        self.sums = {"float32": self}
        self.block_until_ready = lambda: waited.append(number)


@pytest.mark.parametrize(("steps", "devices", "is_on_cpu", "most"), [
    (32, 1, True, loop.MAX_WHOLE_GROUPS_IN_FLIGHT), (4, 1, True, loop.MAX_IN_FLIGHT),
    (1, 1, True, loop.MAX_SINGLE_STEPS_IN_FLIGHT), (1, 8, False, loop.MAX_SINGLE_STEPS_IN_FLIGHT),
    (1, 8, True, loop.MAX_IN_FLIGHT)])
def test_single_steps_of_a_group_are_queued_unless_several_devices_are_cpus(steps, devices, is_on_cpu, most):
    strategy = types.SimpleNamespace(is_on_cpu=is_on_cpu, mesh=types.SimpleNamespace(size=devices))
    inputs = types.SimpleNamespace(
        core=types.SimpleNamespace(strategy=strategy), in_flight=collections.deque(),
        timing=types.SimpleNamespace(device=contextlib.nullcontext()))
    waited = []
    for number in range(20):
        loop._queue(inputs, GROUP, steps, Logs(number, waited))
        assert len(inputs.in_flight) == min(number + 1, most)
    assert waited == list(range(20 - most))


@pytest.mark.parametrize(("arrays", "spans_processes"), [(None, True), ({}, True), (None, False)])
def test_processes_agree_on_each_group_of_a_prediction_and_on_its_end(arrays, spans_processes):
    said = []
    process_group = types.SimpleNamespace(assert_consistent=lambda what, describe: said.append(describe()))
    inputs = types.SimpleNamespace(
        core=types.SimpleNamespace(strategy=types.SimpleNamespace(
            spans_processes=spans_processes, process_group=process_group)),
        reader=types.SimpleNamespace(arrays=arrays), timing=Timing())
    groups = [types.SimpleNamespace(first=first, count=4, rows=8) for first in (0, 4)]
    assert list(loop._agreed_on(inputs, iter(groups))) == groups
    batches = ["0 to 3 (8 rows each)", "4 to 7 (8 rows each)", "none"]  # "none" comes earlier in a process with fewer
    is_asked = arrays is None and spans_processes
    assert said == [{"next batches": text} for text in batches if is_asked]
