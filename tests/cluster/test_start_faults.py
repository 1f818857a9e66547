"""Real processes that cannot start together: each ends by itself, with an error that says why.

A process that should end at once has a timeout that no test reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys

import pytest

from tests.support.rendezvous_cluster import free_port, is_free
from tests.support.waiting import GUARD_SECS, LONG_SECS

pytestmark = pytest.mark.processes

TIMEOUT_SECS = 4.0  # of the strategy of a process that waits for it
FAILED, REFUSED, PEER_LOST = 1, 2, 75

SCRIPT = """
import os, signal, sys
import jax
import trainer
timeout_secs, *faults = sys.argv[1:]
for fault in faults:
    if fault.startswith("SIG"):  # the processes have met, and JAX is to start
        jax.distributed.initialize = lambda **options: os.kill(os.getpid(), getattr(signal, fault))
if "no luck" in faults:
    def fail(**options):
        raise RuntimeError("no luck")
    jax.distributed.initialize = fail
if "loopback" in faults:  # as on two machines whose host names lead to loopback
    from trainer.distribute.cluster.rendezvous import gather
    gather.why_not_connected = lambda places: f"{len(places)} processes are not connected."
if "use JAX" in faults:
    jax.devices()
print("ready", flush=True)
sys.stdin.readline()
options = trainer.distribute.CommunicationOptions(timeout_seconds=float(timeout_secs))
trainer.distribute.MultiWorkerMirroredStrategy(options)
print("started")
"""


@dataclasses.dataclass
class Ended:
    """A process that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stderr.rstrip().rpartition("\n")[2]


class Processes:
    """Processes that import everything, then wait until all may make the strategy at the same time."""

    def __init__(self):
        self._processes: list[subprocess.Popen] = []
        self._suspended: subprocess.Popen | None = None

    def start(self, addresses, index, *, timeout_secs=LONG_SECS, role="worker", fault="", job_id="job"):
        config = {"cluster": {"worker": addresses}, "task": {"type": role, "index": index}}
        self._start({"TF_CONFIG": json.dumps(config), "TRAINER_JOB_ID": job_id}, timeout_secs, fault)

    def start_task(self, port, index, *, timeout_secs=LONG_SECS, job=7):
        """Starts a task of two as SLURM's `srun` does."""
        step = {"JOB_ID": job, "STEP_ID": 0, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": index,
                "LOCALID": index}
        self._start({"JAX_COORDINATOR_PORT": str(port), **{f"SLURM_{name}": str(step[name]) for name in step}},
                    timeout_secs)

    def _start(self, variables, timeout_secs, fault=""):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        environment.pop("XLA_FLAGS", None)
        self._processes.append(subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(timeout_secs), *filter(None, [fault])], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True))

    def end(self, but_for: int | None = None) -> list[Ended]:
        """Lets all make the strategy; returns how they ended, in the order of their start, `but_for` one of them."""
        for process in self._processes:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in self._processes:
            process.stdin.write("\n")
            process.stdin.flush()
        if but_for is not None:
            self._suspended = self._processes.pop(but_for)
        ended = []
        for process in self._processes:
            stdout, stderr = process.communicate(timeout=GUARD_SECS)
            assert all(line.startswith("Warning: ") for line in stdout.splitlines()), "no strategy is made"
            with pytest.raises(ProcessLookupError):  # nothing that it started is left either
                os.killpg(process.pid, 0)
            ended.append(Ended(process.returncode, stdout, stderr))
        return ended

    def close(self) -> None:
        for process in [*self._processes, *filter(None, [self._suspended])]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate(timeout=GUARD_SECS)


@pytest.fixture
def processes():
    with contextlib.closing(Processes()) as started:
        yield started


def loopback(count):
    ports = set()
    while len(ports) < count:
        ports.add(free_port())
    return [f"127.0.0.1:{port}" for port in ports]


def port_is_free(address):
    return is_free(int(address.rpartition(":")[2]))


def test_whoever_is_there_names_the_worker_that_is_missing(processes):
    one, other = loopback(2), loopback(2)
    processes.start(one, 0, timeout_secs=TIMEOUT_SECS)
    processes.start(other, 1, timeout_secs=TIMEOUT_SECS)
    first, second = processes.end()
    assert (first.code, second.code) == (FAILED, FAILED)
    assert "ClusterTimeout: After 4 s, 1 of 2 processes are missing" in first.last_line
    assert f"worker 1 ({one[1]})" in first.last_line
    assert "ClusterTimeout: worker 1 did not meet the other processes within 4 s" in second.last_line
    assert f"It awaited worker 0 ({other[0]}): connection refused" in second.last_line
    assert port_is_free(one[0]) and port_is_free(other[0])


def test_a_wrong_port_of_a_worker_is_told_to_all_at_once(processes):
    addresses, wrong = loopback(2), loopback(1)
    processes.start(addresses, 0)
    processes.start([addresses[0], *wrong], 1)
    for ended in processes.end():
        assert ended.code == REFUSED
        assert f"its cluster has '{wrong[0]}' as address 1, not '{addresses[1]}' as on worker 0" in ended.stderr
        assert "Start all with the same" in ended.last_line
    assert port_is_free(addresses[0])


def test_a_wrong_port_of_worker_0_is_named_as_the_likely_cause(processes):
    addresses, wrong = loopback(2), loopback(1)
    processes.start(addresses, 0, timeout_secs=TIMEOUT_SECS)
    processes.start([*wrong, addresses[1]], 1, timeout_secs=TIMEOUT_SECS)
    first, second = processes.end()
    assert (first.code, second.code) == (FAILED, FAILED)
    assert "has another address for worker 0 in its TF_CONFIG" in first.last_line
    assert f"It awaited worker 0 ({wrong[0]}): connection refused" in second.last_line
    assert "Check the address of worker 0 in this process's TF_CONFIG" in second.last_line
    assert port_is_free(addresses[0]) and port_is_free(wrong[0])


def test_two_processes_with_one_index_are_named_to_all(processes):
    addresses = loopback(3)
    for index in (0, 1, 1):
        processes.start(addresses, index)
    for ended in processes.end():
        assert ended.code == REFUSED
        assert f"Two processes are worker 1 ({addresses[1]}): pid " in ended.stderr
        assert "Give each an index of its own." in ended.stderr
    assert port_is_free(addresses[0])


def test_processes_of_two_jobs_do_not_train_together(processes):
    addresses = loopback(2)
    processes.start(addresses, 0, timeout_secs=TIMEOUT_SECS, job_id="monday")
    processes.start(addresses, 1, job_id="tuesday")
    first, second = processes.end()
    assert (first.code, second.code) == (FAILED, REFUSED)
    for ended in (first, second):
        assert "its job id is 'tuesday', not 'monday' as on worker 0" in ended.stderr
    assert "ClusterTimeout: After 4 s" in first.last_line, "its own worker 1 may still come"
    assert first.stdout.startswith("Warning: worker 0 has refused a process of another job")
    assert port_is_free(addresses[0])


def test_a_port_that_another_program_holds_is_named(processes):
    addresses = loopback(2)
    port = int(addresses[0].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        processes.start(addresses, 0)
        processes.start(addresses, 1, timeout_secs=TIMEOUT_SECS)
        first, second = processes.end()
        assert not port_is_free(addresses[0])
    assert (first.code, second.code) == (REFUSED, FAILED)
    assert f"ClusterError: Port {port} is in use, and worker 0 ({addresses[0]}) must listen on it" in first.last_line
    assert "it accepts the connection but does not answer" in second.last_line
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize(("signal", "index", "says"), [
    ("SIGKILL", 0, "worker 0, which coordinates the job, is lost: its process has ended"),
    ("SIGKILL", 1, "worker 1 is lost: its process has ended"),
    ("SIGSTOP", 0, r"worker 0, which coordinates the job, is lost: nothing was heard of it for \d+\.\d s"),
    ("SIGSTOP", 1, r"worker 1 is lost: nothing was heard of it for \d+\.\d s")])
def test_who_dies_or_stops_while_jax_starts_is_named_by_the_others(processes, signal, index, says):
    addresses = loopback(3)
    for number in range(3):
        processes.start(addresses, number, fault=signal if number == index else "",
                        timeout_secs=LONG_SECS if signal == "SIGKILL" else TIMEOUT_SECS)
    for ended in processes.end(but_for=index):
        assert ended.code == PEER_LOST, ended.stderr
        assert re.search(rf"Watchdog: {says}, while JAX started\. Worker \d ends with exit code 75", ended.stderr)
        assert "; its main thread is here:\n" in ended.stderr
    if (signal, index) != ("SIGSTOP", 0):
        socket.create_server(("127.0.0.1", int(addresses[0].rpartition(":")[2]))).close()


def test_an_error_by_which_jax_does_not_start_is_told_to_the_others(processes):
    addresses = loopback(3)
    for number in range(3):
        processes.start(addresses, number, fault="no luck" if number == 1 else "")
    first, second, third = processes.end()
    assert (first.code, second.code, third.code) == (PEER_LOST, FAILED, PEER_LOST)
    assert second.last_line == "RuntimeError: no luck"
    for ended in (first, third):
        assert "Watchdog: worker 1 has failed while JAX started: RuntimeError: no luck. Worker " in ended.stderr


def test_cpu_devices_that_cannot_reach_each_other_are_told_to_all_once_jax_has_them(processes):
    addresses = loopback(2)
    for number in range(2):
        processes.start(addresses, number, fault="loopback")
    for ended in processes.end():
        assert ended.code == REFUSED
        assert ended.last_line.endswith("ClusterError: 2 processes are not connected.")
        assert "Watchdog" not in ended.stderr


def test_jax_that_was_used_before_is_told_before_the_others_count_on_the_process(processes):
    addresses = loopback(2)
    processes.start(addresses, 0, fault="use JAX")
    processes.start(addresses, 1, timeout_secs=TIMEOUT_SECS)
    first, second = processes.end()
    assert (first.code, second.code) == (FAILED, FAILED)
    assert "RuntimeError: `MultiWorkerMirroredStrategy` must be made before JAX is used" in first.last_line
    assert "direct cause" not in first.stderr  # one traceback, not JAX's too
    assert f"It awaited worker 0 ({addresses[0]}): connection refused" in second.last_line
    assert port_is_free(addresses[0])


def test_whoever_is_there_names_the_task_of_slurm_that_is_missing(processes):
    port = free_port()
    processes.start_task(port, 0, timeout_secs=TIMEOUT_SECS)
    ended, = processes.end()
    assert ended.code == FAILED
    assert "After 4 s, 1 of 2 processes are missing: task 1. Connected: none." in ended.last_line
    assert "address for task 0 in its environment (JAX_COORDINATOR_PORT, SLURM_STEP_NODELIST)" in ended.last_line
    assert is_free(port)


def test_tasks_of_two_slurm_jobs_do_not_train_together(processes):
    port = free_port()
    processes.start_task(port, 0, timeout_secs=TIMEOUT_SECS)
    processes.start_task(port, 1, job=8)
    first, second = processes.end()
    assert (first.code, second.code) == (FAILED, REFUSED)
    for ended in (first, second):
        assert "its job id is 'SLURM 8.0, restart 0', not 'SLURM 7.0, restart 0' as on task 0" in ended.stderr
    assert is_free(port)


def test_an_evaluator_is_refused_with_exit_code_2(processes):
    processes.start(loopback(2), 0, role="evaluator")
    ended, = processes.end()
    assert ended.code == REFUSED
    assert "ClusterError: TF_CONFIG says that this process is the 'evaluator', which does not train" in ended.last_line
