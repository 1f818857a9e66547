"""A `train_and_evaluate` that is killed and started again ends with the bits of an undisturbed one."""

from __future__ import annotations

import pathlib
import sys

import pytest

from trainer.testing import Kill, assert_resumes_exactly

pytestmark = pytest.mark.processes

SUPPORT = pathlib.Path(__file__).parents[1] / "support"


@pytest.mark.parametrize(("script", "kills"), [
    ("estimator_training.py", [Kill(step=8), Kill(save=3, delay_secs=0.01)]),
    ("estimator_job.py", [Kill(step=14, process=1)]),
])
def test_the_end_is_that_of_an_undisturbed_run(script, kills):
    assert_resumes_exactly([sys.executable, str(SUPPORT / script)], kills, timeout_secs=180)
