"""How much host memory a run takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import numpy as np
import trainer
from flax import linen as nn

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

small = np.ones((512, 256), np.float32)
big = np.ones((320_000, 256), np.float32)      # 328 MB
model = trainer.Sequential([nn.Dense(1)])
model.compile("sgd", "mse")
model.fit(small, small[:, :1], batch_size=512, verbose=0)
model.predict(small, batch_size=512, verbose=0)
before = peak_mb()
model.fit(big, big[:, :1], batch_size=512, verbose=0)
model.evaluate(big, big[:, :1], batch_size=512, verbose=0)
model.predict(big, batch_size=512, verbose=0)
print((peak_mb() - before) / (big.nbytes / 2**20))
"""


@pytest.mark.slow
def test_a_large_array_is_never_copied_whole():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    grown = float(done.stdout)
    assert grown < 0.7, f"the peak grew by {grown:.2f} times the data"
