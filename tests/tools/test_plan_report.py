"""The arithmetic of a plan, and how it is shown."""

import dataclasses
import json

import pytest

from tests.support import project_files
from trainer.distribute.placement.described import Topology
from trainer.tools.plan.program_contents import Collective
from trainer.tools.plan.report import Alternative, DeviceMemory, Plan
from trainer.tools.plan.roofline import COLLECTIVE_SECS, KERNEL_SECS, Roofline, bandwidth, roofline, sent_rows

ONE_HOST, TWO_HOSTS = Topology.of("8xh100"), Topology.of("2x8xh100")
EVERYONE = tuple(range(16))


def all_reduce(nbytes, group=EVERYONE, times=1, is_asynchronous=True, kernels_between=1):
    return Collective("all-reduce", nbytes, ("f32",), group, times, is_asynchronous, kernels_between)


@pytest.mark.parametrize(("group", "topology", "rate"), [
    (range(8), ONE_HOST, 450e9), (range(2), TWO_HOSTS, 450e9), ((0, 8), TWO_HOSTS, 50e9),
    ((0, 1, 8, 9), TWO_HOSTS, 100e9), (EVERYONE, TWO_HOSTS, 400e9), (range(8), Topology.of("8xa100"), 300e9)])
def test_a_group_is_as_fast_as_its_slowest_hop(group, topology, rate):
    assert bandwidth(group, topology) == rate


def test_each_dtype_is_computed_at_its_own_rate():
    found = roofline({"bfloat16": 989.4e12, "tensorfloat32": 494.7e12, "float64": 67e12}, 0.0, 0, [], ONE_HOST, 1)
    assert found.compute == pytest.approx(3.0)
    assert roofline({"float8_e4m3fn": 1978.9e12}, 0.0, 0, [], ONE_HOST, 1).compute == pytest.approx(1.0)
    assert roofline({"complex64": 67e12}, 0.0, 0, [], ONE_HOST, 1).compute == pytest.approx(1.0)  # the slowest rate


@pytest.mark.parametrize(("products", "traffic", "kernels", "bound", "secs"), [
    ({"bfloat16": 989.4e12}, 3_352_320_000_000 / 2, 10, "compute", 1.0),
    ({"bfloat16": 989.4e12}, 3_352_320_000_000 * 2, 10, "memory", 2.0),
    ({}, 0.0, 3e6, "kernels", 3e6 * KERNEL_SECS)])
def test_a_step_takes_the_longest_of_what_runs_side_by_side(products, traffic, kernels, bound, secs):
    found = roofline(products, traffic, kernels, [], ONE_HOST, 1)
    assert (found.bound, found.step) == (bound, pytest.approx(secs))


def test_work_hides_collectives_that_it_runs_beside_and_no_others():
    second = int(450e9 * 8 / 14)  # of an all-reduce over eight devices
    group = tuple(range(8))
    hidden, alone = all_reduce(second, group), all_reduce(second, group, kernels_between=0)
    waiting = all_reduce(second, group, is_asynchronous=False)
    work = {"bfloat16": 0.75 * 989.4e12}
    assert roofline(work, 0.0, 0, [hidden], ONE_HOST, 1).exposed == pytest.approx(0.25, rel=1e-3)
    assert roofline(work, 0.0, 0, [alone], ONE_HOST, 1).exposed == pytest.approx(1.0 + COLLECTIVE_SECS)
    found = roofline(work, 0.0, 0, [hidden, alone, waiting], ONE_HOST, 1)
    latencies = 3 * COLLECTIVE_SECS
    assert (found.exposed, found.step) == (pytest.approx(2.25 + latencies), pytest.approx(3.0 + latencies))
    assert (found.collectives, found.without_overlap) == (
        pytest.approx(3.0 + latencies), pytest.approx(3.75 + latencies))


def test_collectives_are_added_up_by_kind_and_group_for_one_step():
    found = sent_rows([all_reduce(100, times=4), all_reduce(60, times=4, kernels_between=0),
                       all_reduce(1000, (0, 1), times=4)], TWO_HOSTS, steps=4)
    assert [(row.devices, row.hosts, row.times, row.overlapped, row.nbytes) for row in found] == [
        (2, 1, 1.0, 1.0, 1000.0), (16, 2, 2.0, 1.0, 160.0)]
    assert found[1].sent_bytes == 160 * 2 * 15 / 16
    assert found[1].secs == pytest.approx(2 * COLLECTIVE_SECS + 300 / 400e9)


def test_collectives_of_as_many_devices_over_different_mesh_axes_are_told_apart():
    found = sent_rows([all_reduce(100, (0, 1)), all_reduce(60, (0, 1)), all_reduce(10, (0, 2)), all_reduce(1, (0, 8)),
                       all_reduce(2, (0, 2, 8, 10))], TWO_HOSTS, 1, {"replica": 2, "shard": 4, "model": 2})
    assert [(row.axes, row.nbytes) for row in found] == [
        (("model",), 160.0), (("shard",), 10.0), (("replica", "shard"), 2.0), (("replica",), 1.0)]


def test_a_plan_names_the_mesh_axes_of_collectives_if_there_are_several(plan):
    assert "Over the axes" not in str(plan)
    rows = sent_rows([all_reduce(100, (0, 1)), all_reduce(10, (0, 8))], TWO_HOSTS, 1, {"replica": 2, "shard": 8})
    text = str(dataclasses.replace(plan, collectives=rows))
    assert [line.split()[0::len(line.split()) - 1] for line in text.splitlines() if line.startswith("all-reduce")] == [
        ["all-reduce", "shard"], ["all-reduce", "replica"]]
    assert dataclasses.replace(plan, collectives=rows).to_dict()["collectives"][1]["axes"] == ("replica",)


@pytest.fixture
def plan():
    gib = 2**30
    memory = DeviceMemory(parameters=10 * gib, optimizer_state=20 * gib, model_state=0, batches=gib, other_arguments=8,
                          temporary=30 * gib, results=16, batches_ahead=2 * gib, gradients=10 * gib)
    collectives = [all_reduce(gib, tuple(range(8)))]
    return Plan(
        model="lm", strategy="MirroredStrategy()", topology="8xh100", device=ONE_HOST.gpu.name, num_devices=8,
        num_replicas=8, batch_rows=64, fused_steps=1, memory=memory, device_bytes=ONE_HOST.gpu.memory_bytes,
        memory_fraction=0.75, collectives=sent_rows(collectives, ONE_HOST, 1), flops=1e12,
        product_flops={"bfloat16": 9e11}, traffic_bytes=1e9, kernels=100, roofline=Roofline(0.5, 0.25, 0.0, 0.1, 0.1),
        unknown_loops=0, host_transfers=0, assumptions=("Peak rates.",), alternatives=(
            Alternative("remat=True", 50 * gib, True, 0.75), Alternative("microbatches=2", problem="ValueError: no")))


def test_a_plan_fits_if_its_peak_with_what_is_sent_ahead_does(plan):
    assert plan.memory.step == 61 * 2**30 + 24 and plan.memory.peak == plan.memory.step + 2 * 2**30
    assert not plan.fits and plan.available_bytes == int(0.75 * plan.device_bytes)
    assert dataclasses.replace(plan, memory_fraction=0.9).fits
    assert plan.rows_per_sec == pytest.approx(64 / 0.6)


def test_a_plans_text_says_what_was_found(plan):
    text = str(plan)
    for line in ("lm under MirroredStrategy() on 8xh100 (NVIDIA H100 80GB HBM3): batches of 64 rows, 8 replicas",
                 "Gradients, activations, temporary     30.0 GiB  the gradients alone: 10.0 GiB",
                 "does not fit into 59.3 GiB, 75 % of the device's 79.1 GiB",
                 "bound by compute; at most 107 rows/s", "- Peak rates."):
        assert line in text
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["all-reduce"][1:] == ["8", "1", "1", "1", "1.0", "GiB", "1.8", "GiB", "4.19", "ms"]
    assert rows["remat=True"][1:] == ["50.0", "GiB", "yes", "750", "ms"]
    assert rows["microbatches=2"][1:] == ["ValueError:", "no"]
    assert max(map(len, text.splitlines())) <= 120


def test_the_page_shows_plans_as_they_are_printed(plan):
    page = (project_files.ROOT / "docs" / "plan.md").read_text()
    shown = page.partition("```text\n")[2].partition("\n```")[0]

    def labels(text):
        return [line.split("  ")[0] for line in text.splitlines() if "  " in line and "=" not in line]

    own = dataclasses.replace(plan, alternatives=())
    assert [label for label in labels(shown) if label not in labels(str(own))] == [
        "Alternatives", "FullyShardedStrategy()", "batches of 256 rows"]
    assert not [label for label in labels(str(own)) if label not in labels(shown)]


def test_a_plan_of_one_device_has_no_collectives(plan):
    text = str(dataclasses.replace(plan, collectives=(), alternatives=(), fused_steps=16, unknown_loops=1))
    assert "Collectives of a step: none" in text and "Alternatives" not in text
    assert "of 16 fused steps" in text and "1 loop of unknown length" in text


def test_a_plan_is_json(plan):
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["memory"]["peak"] == plan.memory.peak and read["fits"] is False
    assert read["roofline"]["step"] == pytest.approx(0.6) and read["collectives"][0]["kind"] == "all-reduce"
    assert read["alternatives"][1]["problem"] == "ValueError: no"
