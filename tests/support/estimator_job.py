"""A `train_and_evaluate` by two workers, which the launcher starts, and an evaluator: `python estimator_job.py`.

Each runs estimator_training.py. It ends when all have, and writes all arrays of the last checkpoint, and the last
evaluation, to result.npz; or it ends with the exit code of the first that failed.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np

SCRIPT = str(pathlib.Path(__file__).with_name("estimator_training.py"))
CLUSTER = {"worker": ["localhost:1", "localhost:2"]}  # of which the evaluator asks nothing


def main() -> int:
    config = {"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}}
    evaluator = subprocess.Popen([sys.executable, SCRIPT], env={**os.environ, "TF_CONFIG": json.dumps(config)})
    workers = subprocess.Popen([sys.executable, "-m", "trainer.launch", "--workers", "2", SCRIPT])
    try:
        while workers.poll() is None and evaluator.poll() in (None, 0):
            time.sleep(0.05)
        return workers.wait(120) or evaluator.wait(120)
    finally:
        for process in (workers, evaluator):
            process.kill()
            process.wait()


code = main()
if code == 0:
    from estimator_training import variables  # which one process reads: all of a job would read them together

    with np.load("evaluated.npz") as evaluated:
        np.savez("result.npz", **variables(), **evaluated)
sys.exit(code)
