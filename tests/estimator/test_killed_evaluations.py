"""A `train_and_evaluate` that is killed in its evaluations and exports makes those of an undisturbed one."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from trainer.estimator.training.evaluation_record import FILE_NAME

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "estimator_evaluations.py"
LONGEST_SECS = (1.5, 0.4, 0.1, 0.0)  # of delays, for machines on which an evaluation with its exports is fast


def start(folder):
    with (folder / "errors.txt").open("w") as file:
        return subprocess.Popen([sys.executable, str(SCRIPT)], cwd=folder, stdout=file, stderr=file,
                                env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])})


def result(folder):
    process = start(folder)
    assert process.wait(180) == 0, (folder / "errors.txt").read_text()
    return json.loads((folder / "result.json").read_text())


def begun(folder):
    path = folder / "begun.txt"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_in_an_evaluation(folder, delay_secs):
    """Starts the script, and kills it so long after an evaluation has begun.

    Returns whether it was killed: not after `train_and_evaluate` has returned.
    """
    before = begun(folder)
    process = start(folder)
    while begun(folder) == before and process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay_secs)
    process.send_signal(signal.SIGSTOP)
    is_in_call = (folder / "run" / FILE_NAME).exists()
    process.send_signal(signal.SIGKILL if is_in_call else signal.SIGCONT)
    assert process.wait(180) == (-signal.SIGKILL if is_in_call else 0), (folder / "errors.txt").read_text()
    return is_in_call


def result_with_kills(folder, kills, rng, longest_secs):
    """Returns the result of a run after some kills in its evaluations, and the number of kills."""
    folder.mkdir()
    killed = 0
    while killed < kills and not (folder / "result.json").exists():
        if not kill_in_an_evaluation(folder, rng.uniform(0, longest_secs)):
            return json.loads((folder / "result.json").read_text()), killed
        killed += 1
    return result(folder), killed


def test_evaluations_and_exports_are_those_of_an_undisturbed_run(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    expected = result(tmp_path / "undisturbed")
    assert len(expected["evaluations"]) == 6
    assert expected["exported"] == [None, "best", None, "latest", "final"]
    assert [len(expected["predictions"][name]) for name in ("best", "worst", "latest", "final")] == [1, 1, 2, 1]
    rng = random.Random(0)
    for longest_secs in LONGEST_SECS:
        found, kills = result_with_kills(tmp_path / str(longest_secs), 4, rng, longest_secs)
        assert found == expected
        if kills:
            break
    assert kills
