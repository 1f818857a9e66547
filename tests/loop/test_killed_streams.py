"""A training on a stream with a position that is killed and started again gives the bits of an undisturbed one."""

import importlib.util
import pathlib
import sys

import pytest

from trainer.testing import Kill, assert_resumes_exactly

pytestmark = pytest.mark.processes

SCRIPT = str(pathlib.Path(__file__).parents[1] / "support" / "stream_training.py")
LAUNCH = [sys.executable, "-m", "trainer.launch", "--workers", "2"]
needs_datasets, needs_torchdata = (
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs `{name}`")
    for name in ("datasets", "torchdata"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("command", "kind", "kills"), [
    ([sys.executable], "loader", [Kill(step=6), Kill(step=13)]),
    (LAUNCH, "joined", [Kill(step=11, process=1)]),
    pytest.param([sys.executable], "torchdata", [Kill(step=6), Kill(step=13)], marks=needs_torchdata),
    pytest.param([sys.executable], "hugging face", [Kill(step=6)], marks=needs_datasets),
    pytest.param([sys.executable], "shuffled", [Kill(step=13)], marks=needs_datasets),
])
def test_a_killed_training_on_a_stream_resumes_to_the_bit(command, kind, kills):
    assert_resumes_exactly([*command, SCRIPT, kind], kills, timeout_secs=180)
