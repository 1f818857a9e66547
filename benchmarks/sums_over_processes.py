"""Time of a sum over two processes on a core each, with and without `threads_that_wait_their_turn`.

`python benchmarks/sums_over_processes.py [--rounds N]` prints the ratio for each round. As long as it is well above 1,
the workaround of `trainer/distribute/cluster/workarounds.py` is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from trainer.testing import LocalCluster


def secs_of_a_sum() -> float:
    """Returns the median seconds in the calmest of many moments, as the machine may be busy."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[json.loads(os.environ["TF_CONFIG"])["task"]["index"]]})
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from trainer.distribute.cluster import join_cluster

    join_cluster()
    mesh = Mesh(np.array(jax.devices()), ("d",))
    total = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()))
    x = jax.make_array_from_callback(
        (2, 100), NamedSharding(mesh, PartitionSpec("d")), lambda index: np.ones((1, 100), np.float32))
    secs = []
    for _ in range(420):
        begin = time.perf_counter()
        total(x).block_until_ready()
        secs.append(time.perf_counter() - begin)
    return float(min(np.median(secs[start:start + 20]) for start in range(20, 420, 20)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    for _ in range(parser.parse_args().rounds):
        without, with_it = (LocalCluster(2, env={"TRAINER_WORKAROUNDS": switch}).run(secs_of_a_sum)[0]
                            for switch in ("0", "1"))
        print(f"{1e6 * without:.0f} us without the workaround, {1e6 * with_it:.0f} us with it: {without / with_it:.2f}")


if __name__ == "__main__":
    main()
