"""Two real processes in the middle of a training, to one of which something happens: the other ends, says what it was,
and leaves all that is needed to go on.

They have a timeout that no test reaches, unless it is what ends them.

Two scenarios run at a time: what a test waits for, and what the next one will.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import signal
import threading

import numpy as np
import pytest

from tests.support.run_fault_scenarios import (
    DATA_ERROR,
    DATA_NOTE,
    EPOCHS,
    FAULT_STEP,
    SAVED_STEPS,
    STEPS,
    Scenarios,
)

pytestmark = pytest.mark.processes

PEER_LOST, FAILED = 75, 1

TODO = {
    "saved for long": lambda run: run.saved_for_long(),
    "worker killed": lambda run: run.struck("SIGKILL", 1),
    "worker suspended": lambda run: run.struck("SIGSTOP", 1),
    "chief killed": lambda run: run.struck_and_resumed("SIGKILL", 0),
    "data blocked": lambda run: run.struck("block", 1),
    "worker exits": lambda run: run.struck("exit", 1),
    "data raise": lambda run: run.struck_and_resumed("raise", 1),
    "chief's data raise": lambda run: run.struck("raise", 0),
    "launched data raise": lambda run: run.worker_raises_under_launcher(),
    "restarts": lambda run: run.worker_killed_under_launcher(),
    "launcher killed": lambda run: run.launcher_signalled(signal.SIGKILL),
    "Ctrl-C": lambda run: run.launcher_signalled(signal.SIGINT),
}
"""The scenarios, in the order of the tests."""


@pytest.fixture(scope="module")
def came_of(tmp_path_factory):
    """A function that returns what came of a scenario; the next one begins too, as most of the time is waiting."""
    futures: dict[str, concurrent.futures.Future] = {}
    names = list(TODO)
    with (contextlib.closing(Scenarios(tmp_path_factory.mktemp("faults"))) as run,
          concurrent.futures.ThreadPoolExecutor(2) as pool):
        both = threading.Barrier(2)
        list(pool.map(lambda _: both.wait(), range(2)))  # the threads are there before a test that looks for its own

        def result(name):
            for wanted in names[names.index(name):][:2]:
                if wanted not in futures:
                    futures[wanted] = pool.submit(TODO[wanted], run)
            return futures[name].result()

        try:
            yield result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            run.close()


def result_of(folder, index=0):
    with np.load(folder / f"result_{index}.npz") as arrays:
        return dict(arrays)


def trained_in(folder):
    """Returns how many steps each process has done since it was started last."""
    return [int((folder / f"trained_{index}").read_text()) for index in range(2)]


def assert_same_bits(folder, expected_folder):
    for index in range(2):
        result, expected = result_of(folder, index), result_of(expected_folder)
        assert result.keys() == expected.keys() and len(expected["loss"]) == EPOCHS
        for name, values in expected.items():
            np.testing.assert_array_equal(result[name], values, err_msg=name)


def assert_nothing_is_left(struck):
    """Nothing but checkpoints, of which the newest is whole."""
    assert [process.left for process in struck.processes] == [False, False]
    assert struck.port_is_free
    assert not struck.is_over
    assert struck.step in SAVED_STEPS
    assert struck.document["batches"] == struck.document["epoch"] * STEPS + struck.document["batch"] == struck.step


def assert_says(ended, says):
    """A process has ended as one that lost another, and said why and where its main thread was."""
    assert ended.code == PEER_LOST, ended.stderr
    here = r"its main thread is here:\n  File .*|after the error above\."  # that of a collective
    assert re.search(rf"^Watchdog: {says}[^\n]* ({here})", ended.stderr, re.MULTILINE | re.DOTALL), ended.stderr
    assert 'train.py", line ' in ended.stderr, ended.stderr


def test_a_chief_that_saves_for_longer_than_the_limit_is_waited_for_and_both_end_with_one_result(came_of):
    folder, ended = came_of("saved for long")
    assert [process.code for process in ended] == [0, 0], [process.stderr for process in ended]
    assert trained_in(folder) == [STEPS * EPOCHS] * 2
    assert_same_bits(folder, folder)


def test_a_worker_that_is_killed_in_mid_epoch_is_named_with_its_step(came_of):
    struck = came_of("worker killed")
    chief, worker = struck.processes
    assert worker.code == -signal.SIGKILL
    assert_says(chief, rf"worker 1 is lost: its process has ended\. It was at step {FAULT_STEP}, in "
                       r'"callbacks", up to \d+\.\d s ago\. Worker 0 ends at step \d+ with exit code 75')
    assert_nothing_is_left(struck)


def test_a_worker_that_is_suspended_is_named_and_ends_when_it_goes_on(came_of):
    struck = came_of("worker suspended")
    chief, worker = struck.processes
    assert_says(chief, rf"worker 1 is lost: nothing was heard of it for [^\n]* It was at step {FAULT_STEP}, in "
                       r'"callbacks", up to \d+\.\d s ago\. Worker 0 ends at step \d+ with exit code 75')
    assert worker.code in (PEER_LOST, -signal.SIGABRT), worker.stderr
    assert_nothing_is_left(struck)


def test_a_chief_that_is_killed_in_mid_epoch_is_named_with_its_step(came_of):
    struck, _ = came_of("chief killed")
    chief, worker = struck.processes
    assert chief.code == -signal.SIGKILL
    assert_says(worker, rf"worker 0, which coordinates the job, is lost: its process has ended\. It was at "
                        rf'step {FAULT_STEP}, in "callbacks", up to \d+\.\d s ago\. Worker 1 ends at step \d+ with '
                        r"exit code 75")
    assert_nothing_is_left(struck)


def test_a_worker_whose_data_block_is_named_by_both(came_of):
    struck = came_of("data blocked")
    for index, ended in enumerate(struck.processes):
        assert_says(ended, rf'worker 1 has stalled at step {FAULT_STEP - 1}, in "data" for [^\n]*'
                           rf"Worker {index} ends at step \d+ with exit code 75")
    assert_nothing_is_left(struck)


def test_a_worker_whose_script_ends_too_soon_is_named(came_of):
    struck = came_of("worker exits")
    assert_says(struck.processes[0], rf"worker 1 has left the job: its script has ended, at step {FAULT_STEP}, while "
                                     r"worker 0 waits [^\n]*Worker 0 ends at step \d+ with exit code 75")
    worker = struck.processes[1]
    assert worker.code == FAILED, worker.stderr
    assert re.search(rf"^Watchdog: worker 1 has left the job: [^\n]*at step {FAULT_STEP}, [^\n]*\. Worker 1 ends with "
                     "exit code 1; its script had ended", worker.stderr, re.MULTILINE), worker.stderr
    assert_nothing_is_left(struck)


def test_a_worker_whose_data_raise_ends_with_its_error_and_the_other_names_it(came_of):
    struck, _ = came_of("data raise")
    chief, worker = struck.processes
    assert worker.code == FAILED
    assert worker.stderr.endswith(f"{DATA_ERROR}\n{DATA_NOTE}\n")
    assert_says(chief, rf"worker 1 has failed at step \d+: {re.escape(DATA_ERROR)}\. "
                       r"Worker 0 ends at step \d+ with exit code 75")
    assert_nothing_is_left(struck)


def test_a_chief_whose_data_raise_ends_with_its_error_and_the_worker_names_it(came_of):
    struck = came_of("chief's data raise")
    chief, worker = struck.processes
    assert chief.code == FAILED
    assert chief.stderr.endswith(f"{DATA_ERROR}\n{DATA_NOTE}\n")
    assert_says(worker, rf"worker 0 has failed at step \d+: {re.escape(DATA_ERROR)}\. "
                        r"Worker 1 ends at step \d+ with exit code 75")
    assert_nothing_is_left(struck)


def test_under_the_launcher_the_error_of_one_workers_data_comes_last_and_gives_the_exit_code(came_of):
    code, err = came_of("launched data raise")
    assert code == FAILED, err
    assert "Killed" not in err, err
    assert err.endswith(f"[worker 1] {DATA_ERROR}\n[worker 1] {DATA_NOTE}\n"
                        "[launcher] Worker 1 of 2 failed with exit code 1.\n"), err


@pytest.mark.parametrize("name", ["chief killed", "data raise"])
def test_the_same_commands_go_on_from_the_last_checkpoint_and_end_to_the_bit(came_of, name):
    expected, _ = came_of("saved for long")
    struck, resumed = came_of(name)
    assert [process.code for process in resumed] == [0, 0], [process.stderr for process in resumed]
    assert trained_in(struck.folder) == [STEPS * EPOCHS - struck.step] * 2
    assert_same_bits(struck.folder, expected)
    # Nothing is left of a checkpoint that was being written either.
    assert sorted(path.name for path in (struck.folder / "backup").glob("step_*")) == ["step_21", "step_24"]


def test_the_launcher_starts_a_training_again_that_goes_on_to_the_bit(came_of):
    expected, _ = came_of("saved for long")
    folder, code, err = came_of("restarts")
    assert code == 0, err
    assert "Worker 1 of 2 was killed by SIGKILL" in err
    assert err.count("Starting all workers again") == 1
    one, other = trained_in(folder)
    assert one == other and STEPS * EPOCHS - one in SAVED_STEPS
    assert_same_bits(folder, expected)


@pytest.mark.parametrize(("name", "expected"), [("launcher killed", -signal.SIGKILL), ("Ctrl-C", 130)])
def test_no_worker_outlives_a_launcher_that_is_ended_in_the_middle_of_a_training(came_of, name, expected):
    assert came_of(name) == expected
