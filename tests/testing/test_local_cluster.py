"""A local cluster calls a function in fresh processes and brings back what they return, or why they failed."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from trainer.testing.local_cluster import LocalCluster, WorkerError, _place_of

pytestmark = pytest.mark.processes


def place_and_arguments(*args):
    import jax

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return {"task": (task["type"], task["index"]), "devices": jax.device_count(), "args": args,
            "array": jax.numpy.full((2,), task["index"], "bfloat16"), "best": float("-inf"), "pid": os.getpid()}


def fail_in_one(failing, how):
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if index != failing:
        time.sleep(600)
    if how == "raise":
        raise ValueError(f"no such thing in {index}")
    if how == "return":
        return object()
    os._exit(0)


def hang_in_one(hanging):
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    pathlib.Path(f"pid_{index}").write_text(str(os.getpid()))
    if index == hanging:
        time.sleep(600)


class Holder:
    @staticmethod
    def double(value):
        return 2 * value

    def method(self):
        return None


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_each_process_has_its_place_and_devices_and_values_come_back_as_they_are():
    args = ({1: [None, 2.5, b"x"]}, (np.arange(6, dtype=np.int16).reshape(2, 3), np.float64(0.1)))
    results = LocalCluster(2, devices_per_worker=3).run(place_and_arguments, *args)
    assert [result["task"] for result in results] == [("worker", 0), ("worker", 1)]
    assert len({result["pid"] for result in results} | {os.getpid()}) == 3
    for index, result in enumerate(results):
        assert result["devices"] == 3 and result["best"] == float("-inf")
        assert result["args"][0] == args[0] and result["args"][1][1] == np.float64(0.1)
        assert result["args"][1][0].dtype == np.int16
        np.testing.assert_array_equal(result["args"][1][0], args[1][0])
        assert result["array"].dtype.name == "bfloat16"
        np.testing.assert_array_equal(result["array"].astype(np.float32), [index, index])


def test_the_error_has_the_traceback_of_the_worker_that_failed():
    with pytest.raises(WorkerError, match=r"^Worker 1 of 2 failed with exit code 1\.\nTraceback") as caught:
        LocalCluster(2).run(fail_in_one, 1, "raise")
    error = caught.value
    assert (error.worker, error.exit_code) == (1, 1)
    assert "in fail_in_one" in error.traceback and error.traceback.endswith("ValueError: no such thing in 1\n")


def test_a_result_that_is_no_plain_value_is_an_error():
    with pytest.raises(WorkerError, match="`result` is of type object"):
        LocalCluster(1).run(fail_in_one, 0, "return")


def test_a_process_that_ends_before_the_function_returns_is_an_error():
    with pytest.raises(WorkerError, match="Worker 0 of 1 ended with exit code 0 before the function returned"):
        LocalCluster(1).run(fail_in_one, 0, "exit")


def test_after_the_timeout_no_process_is_left_and_the_error_says_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for timeout_secs in (3, 9, 27, 81):  # until the process has had time to start
        with pytest.raises(TimeoutError, match="these workers had not ended: 0") as caught:
            LocalCluster(1, timeout_secs=timeout_secs).run(hang_in_one, 0)
        if (tmp_path / "pid_0").exists():
            break
    assert "Worker 0 was here:\n" in str(caught.value) and "in hang_in_one" in str(caught.value)
    assert not is_alive(int((tmp_path / "pid_0").read_text()))


def test_a_script_can_run_its_own_functions(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent("""
        from trainer.testing.local_cluster import LocalCluster

        def double(value):
            return 2 * value

        if __name__ == "__main__":
            print(LocalCluster(1).run(double, 21))
    """))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("[42]\n", "")


def test_a_static_method_has_a_name_that_other_processes_find():
    assert _place_of(Holder.double)[1:] == ("Holder.double", os.path.abspath(__file__))


@pytest.mark.parametrize(("function", "error", "says"), [
    (lambda: None, ValueError, "find under its name in a module. Received: '<lambda>'"),
    (Holder().method, ValueError, "Received: 'Holder.method'"),
    (3, TypeError, "`function` must be a function of a module. Received: a value of type int."),
])
def test_functions_that_other_processes_would_not_find_are_refused(function, error, says):
    with pytest.raises(error, match=says):
        LocalCluster(2).run(function)


def test_arguments_that_are_not_plain_values_are_refused():
    with pytest.raises(TypeError, match=r"`call\['args'\]\[1\]` is of type object") as caught:
        LocalCluster(2).run(fail_in_one, 0, object())
    assert "A `LocalCluster` passes arguments and results" in caught.value.__notes__[0]


@pytest.mark.parametrize(("options", "says"), [
    ({"n": 0}, "`n` must be a whole number of at least 1"),
    ({"n": 1, "devices_per_worker": 0}, "`devices_per_worker` must be a whole number of at least 1"),
    ({"n": 1, "timeout_secs": 0}, r"`timeout_secs` must be greater than 0\. Received: 0\."),
])
def test_clusters_that_make_no_sense_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        LocalCluster(**options)
