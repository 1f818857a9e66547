"""What is read from the text of programs for GPUs: small programs in the words of XLA."""

import pytest

from trainer.core.compile.hlo_text import Program
from trainer.tools.plan.program_contents import (
    Collective,
    collectives_of,
    host_transfers,
    kernels,
    traffic_bytes,
    unknown_loops,
)

TEXT = """\
HloModule jit__execute, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_gather (table: f32[1000,4], rows: s32[8]) -> f32[8,4] {
  %table = f32[1000,4]{1,0} parameter(0)
  %rows = s32[8]{0} parameter(1)
  ROOT %rows_of = f32[8,4]{1,0} gather(%table, %rows), offset_dims={1}
}

%fused_write (stack: f32[16,8], row: f32[1,8], at: s32[]) -> f32[16,8] {
  %stack = f32[16,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %written = f32[16,8]{1,0} dynamic-update-slice(%stack, %row, %at, %zero)
  ROOT %same = f32[16,8]{1,0} bitcast(%written)
}

%fused_double (q: f32[8,4]) -> f32[8,4] {
  %q = f32[8,4]{1,0} parameter(0)
  ROOT %twice = f32[8,4]{1,0} add(%q, %q)
}

%async_scatter (z: f32[64]) -> f32[8] {
  %z = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8]{0} reduce-scatter(%z), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}

%body (carry: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %carry = (s32[], f32[8,4]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %array = f32[8,4]{1,0} get-tuple-element(%carry), index=1
  %all-reduce-start = f32[8,4]{1,0} all-reduce-start(%array), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %doubled = f32[8,4]{1,0} fusion(%array), kind=kLoop, calls=%fused_double
  %all-reduce-done = f32[8,4]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%number, %all-reduce-done)
}

%condition (carry.1: (s32[], f32[8,4])) -> pred[] {
  %carry.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] custom-call(%carry.1), custom_call_target="less"
}

ENTRY %main (p: f32[8,4], table.1: f32[1000,4], r: s32[8]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %table.1 = f32[1000,4]{1,0} parameter(1)
  %r = s32[8]{0} parameter(2)
  %looked_up = f32[8,4]{1,0} fusion(%table.1, %r), kind=kLoop, calls=%fused_gather
  %half = bf16[64]{0} convert(%looked_up)
  %all-gather-start = ((bf16[64]{0}, f32[8,4]{1,0}), (bf16[512]{0}, f32[64,4]{1,0})) all-gather-start(%half, %p), replica_groups={}, dimensions={0}
  %all-gather-done = (bf16[512]{0}, f32[64,4]{1,0}) all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%half), calls=%async_scatter
  %reduce-scatter-done = f32[8]{0} reduce-scatter-done(%reduce-scatter-start)
  %alone = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %init = (s32[], f32[8,4]{1,0}) tuple(%r, %p)
  %while.1 = (s32[], f32[8,4]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %while.2 = (s32[], f32[8,4]{1,0}) while(%while.1), condition=%condition, body=%body
  %to_host = f32[8,4]{1,0:S(5)} copy(%p)
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%while.2), index=1
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
    return Program(TEXT)


def test_collectives_are_read_with_their_whole_arrays_groups_and_trips(program):
    everyone = tuple(range(8))
    assert sorted(collectives_of(program, 8)) == [
        Collective("all-gather", 8 * (64 * 2 + 8 * 4 * 4), ("bf16", "f32"), everyone, 1, True, 0),
        # Five times in the loop of known length, and once in the other one.
        Collective("all-reduce", 8 * 4 * 4, ("f32",), (0, 4), 6, True, 1),
        Collective("reduce-scatter", 64 * 4, ("f32",), everyone, 1, True, 0),
    ]


@pytest.mark.parametrize(("kind", "devices", "sent"), [
    ("all-reduce", 4, 150.0), ("all-gather", 4, 75.0), ("reduce-scatter", 2, 50.0), ("collective-permute", 2, 100.0)])
def test_a_device_sends_what_a_ring_makes_it_send(kind, devices, sent):
    assert Collective(kind, 100, ("f32",), tuple(range(devices)), 1, False, 0).sent_bytes == sent


@pytest.mark.parametrize(("groups", "first"), [
    ("replica_groups={{0,2},{1,3}}", (0, 2)), ("replica_groups={}", (0, 1, 2, 3)),
    ("replica_groups=[2,2]<=[4]", (0, 1)),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", (0, 2)), ("replica_groups=mesh['a'=2,'b'=2] {'a'}", (0, 2)),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", (0, 1)), ("channel_id=1", (0, 1, 2, 3)),
])
def test_groups_are_read_in_each_of_their_forms(groups, first):
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n" \
           f"  ROOT %r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    assert [each.group for each in collectives_of(Program(text), 4)] == [first]


def test_kernels_move_what_they_touch(program):
    looked_up = 8 * 4 * 4 + 8 * 4 + 8 * 4 * 4  # the rows that are gathered, their numbers, the result
    converted, copied = 8 * 4 * 4 + 64 * 2, 2 * 8 * 4 * 4
    of_loops = 6 * (2 * 8 * 4 * 4) + 6 * (1 + 4 + 8 * 4 * 4)  # `doubled`, and the condition's call
    assert traffic_bytes(program) == looked_up + converted + copied + of_loops
    assert kernels(program) == 3 + 6 * 2


def test_what_is_updated_in_place_counts_where_it_changes():
    text = TEXT.replace("%doubled = f32[8,4]{1,0} fusion(%array), kind=kLoop, calls=%fused_double",
                        "%doubled = f32[16,8]{1,0} fusion(%array, %number, %number), kind=kLoop, calls=%fused_write")
    before, after = traffic_bytes(Program(TEXT)), traffic_bytes(Program(text))
    # The stack is neither read nor written as a whole: one row is written, and two numbers are read.
    assert (before - after) / 6 == 2 * 8 * 4 * 4 - (8 * 4 + 2 * 4)


def test_loops_and_host_transfers_are_found(program):
    assert [loop.trip_count for loop in program.loops] == [5, None]
    assert unknown_loops(program) == ["while.2"]
    assert host_transfers(program) == ["to_host"]


def test_text_that_is_none_gives_nothing():
    program = Program("nothing\n  %x = f32[2]{0} parameter(0)\n")
    assert collectives_of(program, 8) == [] and traffic_bytes(program) == 0.0 and program.loops == []
