"""A generator that ends early in one of two real processes is said to have ended early, in both."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import project_files

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import sys
import numpy as np
from flax import linen as nn
import jax, trainer
from trainer.distribute.cluster.liveness.watchdog import watchdog

strategy = trainer.distribute.MultiWorkerMirroredStrategy()
watchdog().timeout_secs = 5.0  # not before, as to start may take longer
watchdog()._star.wake()
with strategy.scope():
    model = trainer.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
count = int(sys.argv[1 + jax.process_index()])
batches = ((np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)) for _ in range(count))
model.fit(batches, verbose=0, **eval(sys.argv[3]))
"""
EARLY = ("an epoch has ended in worker 1 after step 3, while worker 0 has begun step 5 of it with further batches: the "
         "data of worker 1 have ended early"  # by the watchdog, if the steps wait for each other
         "|batches of the epoch: 5 in worker 0, 3 in worker 1")


@pytest.mark.every_case
@pytest.mark.parametrize(("counts", "arguments", "messages"), [
    ((5, 3), "{}", [EARLY]),
    ((5, 3), "{'max_time': 1000.0}", [EARLY]),  # the processes agree after each execution, too
    ((5, 0), "{}", ["first batch: there in worker 0, none in worker 1", "the generator must yield at least one batch"]),
])
def test_a_generator_that_ends_early_in_one_process_is_diagnosed(tmp_path, counts, arguments, messages):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "trainer.launch", "--workers", "2", str(script), *map(str, counts), arguments],
        cwd=project_files.ROOT, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True,
        timeout=120, check=False)
    assert done.returncode != 0
    for message in messages:
        assert re.search(message, done.stderr), done.stderr
