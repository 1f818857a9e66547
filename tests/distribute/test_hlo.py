"""What reductions compile to, for 2, 8 and 32 replicas; and the reading of it.

XLA keeps these collectives as they are on CPU: a reduce-scatter does not become an all-reduce and a slice. It joins
all-reduces that do not depend on each other into one instruction of several arrays, so arrays are counted here: each is
a rendezvous still. A loop that runs once, as a ring of two has, is no loop any more. It passes bfloat16 as
32-bit floats, so twice the bytes; gradients here are of 32 bits.
"""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from tests.support import project_files
from tests.support.hlo import Collective, collectives, instructions, total_bytes
from tests.support.reductions import AXIS, GRADIENT_SIZE, GRADIENTS, collectives_of_algorithms, compiled_collectives
from trainer.distribute.replica import collectives as replica_collectives
from trainer.distribute.replica.collectives import NcclAllReduce
from trainer.distribute.replica.communication_options import CommunicationOptions

PROGRAM = """\
HloModule jit_step, entry_computation_layout={(f32[1,24]{1,0})->f32[]}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_body.1 (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %passed = f32[4]{0} collective-permute(%got), channel_id=3, source_target_pairs={{0,1},{1,0}}
}

%branch (taken: f32[2]) -> f32[2] {
  %told = f32[2]{0} collective-broadcast(%taken), replica_groups={{0,1}}
}

%outer_body (carry.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %either = f32[2]{0} conditional(%which, %a, %b), branch_computations={%other_branch, %branch}
  %while.2 = (s32[], f32[4]{0}) while(%tuple.7), condition=%cond, body=%inner_body.1, backend_config={"known_trip_count":{"n":"3"}}
}

%unknown_body (carry.2: f32[2]) -> f32[2] {
  %scattered = bf16[2]{0} reduce-scatter(%y), replica_groups=mesh['replica'=4] {'replica'}, to_apply=%add
}

ENTRY %main.5_spmd (param: f32[1,24]) -> f32[] {
  %all-reduce = (f32[1,2]{1,0}, /*index=1*/s32[]) all-reduce(%a, %b), to_apply=%add, metadata={op_name="jit(all-gather(x))"}
  %part = f32[1,2]{1,0} get-tuple-element(%all-reduce), index=0
  %while.3 = (s32[], f32[4]{0}) while(%tuple.8), condition=%cond, body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}
  %while.4 = f32[2]{0} while(%c), condition=%cond, body=%unknown_body
  ROOT %whole = pred[8]{0} all-gather(%part), dimensions={0}
}
"""  # noqa: E501


def test_collectives_are_read_with_their_arrays_and_the_trips_of_loops_around_them():
    assert collectives(PROGRAM) == [
        Collective("collective-permute", "f32", (4,), 16, "passed", 15),
        Collective("collective-broadcast", "f32", (2,), 8, "told", 5),
        Collective("reduce-scatter", "bf16", (2,), 4, "scattered", 1),
        Collective("all-reduce", "f32", (1, 2), 8, "all-reduce", 1),
        Collective("all-reduce", "s32", (), 4, "all-reduce", 1),
        Collective("all-gather", "pred", (8,), 8, "whole", 1),
    ]


def test_bytes_are_added_up_over_trips_and_instructions_counted_once():
    found = collectives(PROGRAM)
    assert total_bytes(found, "collective-permute") == 15 * 16
    assert total_bytes(found, "all-reduce") == 12 and instructions(found, "all-reduce") == 1
    assert total_bytes(found, "all-to-all") == instructions(found, "all-to-all") == 0


def test_a_program_of_another_backend_is_refused():
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n  %start = f32[4]{0} all-reduce-start(%x), to_apply=%add\n}"
    with pytest.raises(ValueError, match="all-reduce-start is not understood"):
        collectives(text)


@pytest.fixture(scope="module")
def algorithms():
    """The collectives of every algorithm, by the number of replicas and the algorithm's name."""
    found = {number: collectives_of_algorithms(number) for number in (2, 8)}
    process = subprocess.run([sys.executable, "-m", "tests.support.reductions", "32"], cwd=project_files.ROOT,
                             capture_output=True, text=True, timeout=120, check=True)
    found[32] = {name: [Collective(*fields)._replace(shape=tuple(fields[2])) for fields in each]
                 for name, each in json.loads(process.stdout).items()}
    return found


def in_short(found):
    return [(each.kind, each.shape, each.times) for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8, 32])
def test_the_backends_all_reduce_is_one_of_all_bytes_of_the_gradients(algorithms, number):
    found = algorithms[number]["nccl"]
    assert in_short(found) == [("all-reduce", (GRADIENT_SIZE,), 1)]
    assert total_bytes(found, "all-reduce") == sum(leaf.nbytes for leaf in GRADIENTS.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_ring_is_two_loops_of_as_many_copies_as_there_are_other_replicas(algorithms, number):
    part = math.ceil(GRADIENT_SIZE / number)
    found = algorithms[number]["ring"]
    assert in_short(found) == [("collective-permute", (part,), number - 1)] * 2
    # Patarasuk and Yuan's lower bound, of the padded vector.
    padded_bytes = 4 * part * number
    assert total_bytes(found, "collective-permute") == 2 * (number - 1) * padded_bytes // number


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("number", [2, 8, 32])
def test_a_reduction_to_one_device_is_two_trees_of_whole_copies(algorithms, number):
    rounds = 2 * int(math.log2(number))
    assert in_short(algorithms[number]["one_device"]) == [("collective-permute", (GRADIENT_SIZE,), 1)] * rounds


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("number", "group", "part"), [(2, 2, 20), (8, 4, 10), (32, 8, 5)])
def test_only_a_part_of_the_gradients_passes_between_groups(algorithms, number, group, part):
    across = [("all-reduce", (part,), 1)] if number > group else []  # two replicas are a single group
    assert in_short(algorithms[number]["hierarchical"]) == [
        ("reduce-scatter", (part,), 1), *across, ("all-gather", (part * group,), 1)]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("bytes_per_pack", "shapes"), [
    (0, [(24,)]), (64, [(16,), (8,)]), (48, [(12,), (12,)]), (16, [(4,)] * 6)])
def test_smaller_packs_mean_more_arrays_of_the_same_bytes(bytes_per_pack, shapes):
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    found = compiled_collectives(
        lambda tree: NcclAllReduce().all_reduce("sum", tree, AXIS, 2, options=options), 2,
        [np.zeros(4, np.float32)] * 6)
    assert sorted(each.shape for each in found) == sorted(shapes)
    assert {each.kind for each in found} == {"all-reduce"} and total_bytes(found, "all-reduce") == 96


@pytest.mark.parametrize("number", [2, 8])
def test_gradients_to_shards_are_scattered_and_only_whole_ones_reduced(number):
    axes = {"kernel": 0, "table": 1, "bias": -1}
    tree = {"kernel": np.zeros((8, 3), np.float32), "table": np.zeros((2, 16), np.float32),
            "bias": np.zeros(3, np.float32)}

    def step(tree):
        parts = replica_collectives.reduce_to_shards("mean", tree, axes, AXIS, number, packs=True)
        return replica_collectives.gather_shards(parts, axes, AXIS)

    found = compiled_collectives(step, number, tree)
    assert sorted((each.kind, each.times, each.bytes) for each in found) == [
        ("all-gather", 1, 4 * 24), ("all-gather", 1, 4 * 32), ("all-reduce", 1, 12),
        ("reduce-scatter", 1, 4 * 56 // number)]
