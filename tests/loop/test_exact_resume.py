"""A training that is killed and started again gives, to the bit, what an undisturbed one gives."""

import pathlib
import sys

import pytest

from trainer.testing import Kill, assert_resumes_exactly, kill_at

pytestmark = pytest.mark.processes

SCRIPT = str(pathlib.Path(__file__).parents[1] / "support" / "crash_training.py")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("arguments", "kills"), [
    (("linen", "arrays", "4", "auto"), [Kill(step=8), Kill(validation=3)]),
    (("nnx", "grain", "1", "auto"), [Kill(step=19), Kill(save=2, delay_secs=0.01)]),
    (("custom", "generator", "4", "1", "epoch"), [Kill(step=33)]),
    (("linen", "images", "4", "1"), [Kill(step=7), Kill(step=28)]),
], ids=lambda value: "-".join(value) if isinstance(value, tuple) else "")
def test_a_killed_training_resumes_to_the_bit(arguments, kills):
    assert_resumes_exactly([sys.executable, SCRIPT, *arguments], kills, timeout_secs=120)


def test_a_training_that_draws_unseeded_numbers_is_found_out(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import os, signal, sys
import numpy as np
if "TRAINER_KILL_AT_STEP" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
np.savez("result.npz", same=np.ones(2), random=np.random.default_rng().normal(size=3))
""")
    with pytest.raises(AssertionError, match=r"After 1 of 1 kills.*\nAfter Kill\(step=3.*differ: random\."):
        assert_resumes_exactly([sys.executable, str(script)], [3])


@pytest.mark.parametrize(("source", "message"), [
    ("raise ValueError('no such file')", "ended with exit code 1(.|\n)*no such file"),
    ("import numpy; numpy.savez('result.npz')", r"was not killed at Kill\(step=3.*`kill_at\(\)` given"),
])
def test_a_training_that_fails_or_is_not_killed_is_an_error_of_its_own(tmp_path, source, message):
    script = tmp_path / "train.py"
    script.write_text(source)
    with pytest.raises(RuntimeError, match=message):
        assert_resumes_exactly([sys.executable, str(script)], [3])


@pytest.mark.parametrize("arguments", [{}, {"step": 1, "save": 1}])
def test_a_kill_has_one_moment(arguments):
    with pytest.raises(ValueError, match="one of `step`, `validation` and `save`"):
        Kill(**arguments)


def test_a_step_to_kill_at_counts_from_one():
    with pytest.raises(ValueError, match="`step` must be"):
        kill_at(0)
