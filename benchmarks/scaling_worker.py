"""One process of `scaling.py`, on one core: `python benchmarks/scaling_worker.py CORE MODEL STEPS BATCH_NORM`.

With TF_CONFIG it is a worker of a job. It obeys lines, "run N": `fit` on STEPS batches of N rows, those of all workers.
Each is answered by a line of JSON in standard output, which nothing else can write to.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})  # before XLA counts the cores and starts a thread for each

import loops_trainer
from cases import Workload
from measuring import environment
from worker import timed

from trainer import distribute


def main() -> None:
    """Answers until standard input ends."""
    _, model, steps, batch_norm = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # libraries' output is not an answer
        warnings.simplefilter("ignore")
        in_job = "TF_CONFIG" in os.environ
        strategy = distribute.MultiWorkerMirroredStrategy() if in_job else distribute.OneDeviceStrategy()
        cores = sorted(os.sched_getaffinity(0))
        print(json.dumps({"machine": environment(), "cores": cores}), file=replies, flush=True)
        loops = {}
        for line in sys.stdin:
            batch_size = int(line.split()[1])
            if batch_size not in loops:
                with strategy.scope():
                    loops[batch_size] = loops_trainer.fit(
                        Workload(model, int(steps) * batch_size, batch_size), batch_norm=batch_norm)
            print(json.dumps(timed(loops[batch_size], 1)), file=replies, flush=True)


if __name__ == "__main__":
    main()
