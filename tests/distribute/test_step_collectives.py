"""The collectives of a whole train step, for 2, 8 and 32 replicas: the gradients' bytes and the logs', and no more."""

import functools
import json
import math
import subprocess
import sys

import pytest

from tests.support import project_files
from tests.support.hlo import Collective, total_bytes
from tests.support.step_collectives import CLASSES, LOG_VALUES, SHAPES, STRATEGIES, step_collectives

SIZE = sum(math.prod(shape) for shape in SHAPES.values())
SPLIT = {path: shape for path, shape in SHAPES.items() if path != "down/bias"}  # 3 values do not divide
LOGS = ("all-reduce", (LOG_VALUES,), 1)
WHOLE = ("all-reduce", (CLASSES,), 1)


NUMBERS = [2, 8, pytest.param(32, marks=[pytest.mark.slow, pytest.mark.every_case])]


@functools.cache
def of_32_replicas():
    """Returns the collectives of a step by the strategy's name."""
    process = subprocess.run([sys.executable, "-m", "tests.support.step_collectives", "32"], cwd=project_files.ROOT,
                             capture_output=True, text=True, timeout=300, check=True)
    return {name: [Collective(*fields)._replace(shape=tuple(fields[2])) for fields in each]
            for name, each in json.loads(process.stdout).items()}


@functools.cache
def step_of(name, number):
    """Returns the collectives of a step under a strategy of so many replicas."""
    return of_32_replicas()[name] if number == 32 else step_collectives(name, number)


def in_short(found):
    return sorted((each.kind, each.shape, each.times) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_mirrored_step_reduces_the_gradients_once_and_the_logs_once(number):
    found = step_of("nccl", number)
    assert in_short(found) == sorted([LOGS, ("all-reduce", (SIZE,), 1)])
    assert total_bytes(found, "all-reduce") == 4 * (SIZE + LOG_VALUES)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_ring_passes_parts_of_the_gradients_twice_around(number):
    copies = ("collective-permute", (math.ceil(SIZE / number),), number - 1)
    assert in_short(step_of("ring", number)) == sorted([LOGS, copies, copies])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("number", NUMBERS)
def test_a_reduction_to_one_device_passes_the_gradients_up_and_down_a_tree(number):
    copies = [("collective-permute", (SIZE,), 1)] * (2 * int(math.log2(number)))
    assert in_short(step_of("one_device", number)) == sorted([LOGS, *copies])


@pytest.mark.parametrize(("number", "group"), [
    (2, 2), (8, 4), pytest.param(32, 8, marks=[pytest.mark.slow, pytest.mark.every_case])])
@pytest.mark.sampled
def test_a_hierarchical_reduction_passes_a_part_of_the_gradients_between_groups(number, group):
    part = math.ceil(SIZE / group)
    between = [("all-reduce", (part,), 1)] if group < number else []
    assert in_short(step_of("hierarchical", number)) == sorted(
        [LOGS, ("reduce-scatter", (part,), 1), ("all-gather", (part * group,), 1), *between])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fully_sharded", "sharded_optimizer"])
@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_sharded_step_gathers_the_parameters_and_scatters_the_gradients_once(number, name):
    found = step_of(name, number)
    split_size = sum(math.prod(shape) for shape in SPLIT.values())
    # No moment is gathered: the update is made on parts.
    assert in_short(found) == sorted(
        [LOGS, WHOLE, ("reduce-scatter", (1, split_size // number), 1),
         *(("all-gather", shape, 1) for shape in SPLIT.values())])


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fused_step_has_the_collectives_of_a_single_one(name):
    fused = step_collectives(name, 8, steps_per_execution=4)
    assert sorted(each[:4] for each in fused) == sorted(each[:4] for each in step_of(name, 8))


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_clipping_by_the_norm_of_all_gradients_adds_a_sum_of_one_number_for_each_split_array(number):
    scalars = [("all-reduce", (), 1)] * len(SPLIT)
    assert in_short(step_of("clipped", number)) == sorted([*in_short(step_of("fully_sharded", number)), *scalars])
