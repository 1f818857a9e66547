"""The collectives of a whole train step, for 2, 8 and 32 replicas: the gradients' bytes and the logs', and no more."""

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


@pytest.fixture(scope="module")
def steps():
    """The collectives of a step by the number of replicas and the strategy's name."""
    found = {number: {name: step_collectives(name, number) for name in STRATEGIES} for number in (2, 8)}
    process = subprocess.run([sys.executable, "-m", "tests.support.step_collectives", "32"], cwd=project_files.ROOT,
                             capture_output=True, text=True, timeout=300, check=True)
    found[32] = {name: [Collective(*fields)._replace(shape=tuple(fields[2])) for fields in each]
                 for name, each in json.loads(process.stdout).items()}
    return found


def in_short(found):
    return sorted((each.kind, each.shape, each.times) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_mirrored_step_reduces_the_gradients_once_and_the_logs_once(steps, number):
    found = steps[number]["nccl"]
    assert in_short(found) == sorted([LOGS, ("all-reduce", (SIZE,), 1)])
    assert total_bytes(found, "all-reduce") == 4 * (SIZE + LOG_VALUES)


@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_ring_passes_parts_of_the_gradients_twice_around(steps, number):
    copies = ("collective-permute", (math.ceil(SIZE / number),), number - 1)
    assert in_short(steps[number]["ring"]) == sorted([LOGS, copies, copies])


@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_reduction_to_one_device_passes_the_gradients_up_and_down_a_tree(steps, number):
    copies = [("collective-permute", (SIZE,), 1)] * (2 * int(math.log2(number)))
    assert in_short(steps[number]["one_device"]) == sorted([LOGS, *copies])


@pytest.mark.parametrize(("number", "group"), [(2, 2), (8, 4), (32, 8)])
def test_a_hierarchical_reduction_passes_a_part_of_the_gradients_between_groups(steps, number, group):
    part = math.ceil(SIZE / group)
    between = [("all-reduce", (part,), 1)] if group < number else []
    assert in_short(steps[number]["hierarchical"]) == sorted(
        [LOGS, ("reduce-scatter", (part,), 1), ("all-gather", (part * group,), 1), *between])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fully_sharded", "sharded_optimizer"])
@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_sharded_step_gathers_the_parameters_and_scatters_the_gradients_once(steps, number, name):
    found = steps[number][name]
    split_size = sum(math.prod(shape) for shape in SPLIT.values())
    # No moment is gathered: the update is made on parts.
    assert in_short(found) == sorted(
        [LOGS, WHOLE, ("reduce-scatter", (1, split_size // number), 1),
         *(("all-gather", shape, 1) for shape in SPLIT.values())])


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fused_step_has_the_collectives_of_a_single_one(steps, name):
    fused = step_collectives(name, 8, steps_per_execution=4)
    assert sorted(each[:4] for each in fused) == sorted(each[:4] for each in steps[8][name])


@pytest.mark.parametrize("number", [2, 8, 32])
def test_clipping_by_the_norm_of_all_gradients_adds_a_sum_of_one_number_for_each_split_array(steps, number):
    scalars = [("all-reduce", (), 1)] * len(SPLIT)
    assert in_short(steps[number]["clipped"]) == sorted([*in_short(steps[number]["fully_sharded"]), *scalars])
