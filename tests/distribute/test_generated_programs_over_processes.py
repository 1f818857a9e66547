"""S1 over processes: generated programs give one device's numbers on the devices of two processes.

All run in one cluster and one test, as each start takes seconds. Their data are arrays and datasets, which all
processes have; of lists and generators each process has its own.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.distribute.test_generated_programs import difference, is_chaotic
from tests.support.generated_programs import LAYOUT, generate
from trainer import distribute
from trainer.testing import LocalCluster

pytestmark = pytest.mark.processes

STRATEGIES = {
    "multi_worker": distribute.MultiWorkerMirroredStrategy,
    "fully_sharded": lambda: distribute.FullyShardedStrategy(min_shard_bytes=0),
    # "replica" goes over the processes, and then "shard".
    "hybrid": lambda: distribute.FullyShardedStrategy(min_shard_bytes=0, mesh_shape={"replica": 2, "shard": 2}),
    "sharded_model": lambda: distribute.ModelParallelStrategy(
        {"shard": 2, "model": 2}, layout_map=LAYOUT, min_shard_bytes=0),
    # Its first axis goes over the processes.
    "model_over_processes": lambda: distribute.ModelParallelStrategy({"model": 2, "replica": 2}, layout_map=LAYOUT),
}
SEEDS = [range(5), pytest.param(range(5, 25), marks=pytest.mark.exhaustive)]
PROCESSES, DEVICES = 2, 2
TIMEOUT_SECS = 600.0  # for a busy machine


def program_of(seed):
    return dataclasses.replace(
        generate(seed), form=("arrays", "dataset")[seed % 2], strategies=(list(STRATEGIES)[seed % len(STRATEGIES)],))


def compare(seeds):
    """Compares each program with one device; returns what one process found, by seed, and which are not compared."""
    strategies = {name: make() for name, make in STRATEGIES.items()}
    failures, chaotic = {}, []
    for seed in seeds:
        program = program_of(seed)
        found = difference(program, [strategies[name] for name in program.strategies])
        if found is not None and is_chaotic(program):
            chaotic.append(seed)
        elif found is not None:
            failures[str(seed)] = f"{program}\n{found}"
    return {"failures": failures, "chaotic": chaotic}


@pytest.mark.parametrize("seeds", SEEDS)
def test_generated_programs_give_one_devices_numbers_over_processes(seeds):
    for process, one in enumerate(LocalCluster(PROCESSES, DEVICES, TIMEOUT_SECS).run(compare, list(seeds))):
        assert not one["failures"], f"In process {process}:\n" + "\n".join(one["failures"].values())
        assert len(one["chaotic"]) <= 1, "too many programs are too sensitive to rounding to be compared"
