"""A watchdog ends the processes of a job in which one is gone or stuck, and names that one."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP
from tests.support.rendezvous_cluster import stars_of
from tests.support.waiting import GUARD_SECS, LONG_SECS, until
from trainer.core import timing
from trainer.distribute.cluster import ProcessGroup, membership
from trainer.distribute.cluster.liveness import diagnosis, process_end, watchdog
from trainer.distribute.cluster.liveness.watchdog import Watchdog, is_peer_error
from trainer.launch import job as launch_job
from trainer.testing import LocalCluster, WorkerError

TIMEOUT_SECS = 3.0
HEARTBEAT_SECS = 0.2


def test_errors_of_collectives_are_told_from_own_ones():
    closed = "UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:37257"
    assert is_peer_error(ValueError(closed)) and is_peer_error(jax.errors.JaxRuntimeError(closed))
    assert is_peer_error(jax.errors.JaxRuntimeError("INTERNAL: NCCL operation failed: remote error"))
    assert not is_peer_error(KeyError(closed))
    assert not is_peer_error(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."))


class Heard(Watchdog):
    """A watchdog that keeps the phases that are reported to it."""

    def __init__(self):
        super().__init__(1.0, *stars_of(1))
        self.phases = []

    def progress(self, step, phase):
        self.phases.append((step, phase))


@pytest.mark.processes
def test_a_prediction_and_a_loop_of_ones_own_tell_when_they_wait_for_data(monkeypatch):
    heard = Heard()
    monkeypatch.setattr(watchdog, "_current", heard)
    monkeypatch.setattr(timing, "_progress", heard.progress)
    x = np.ones((6, 6), np.float32)
    model = trainer.Model(LinenMLP(), seed=1)
    model.compile(steps_per_execution=1)
    model.predict(iter([x] * 3), steps=3, verbose=0)
    assert [step for step, phase in heard.phases if phase == "data" and step] == [1, 2, 3]
    assert heard.phases[-1] == (3, "idle")
    heard.phases.clear()
    before = heard._own_steps
    for number, _ in enumerate(trainer.distribute.MirroredStrategy(["cpu:0"]).experimental_distribute_dataset([x, x])):
        assert heard.phases[-2:] == [(before + number + 1, "data"), (before + number + 1, "idle")]
    heard.stop()


@pytest.fixture
def exits(monkeypatch):
    """The codes with which processes would have ended."""
    codes = []
    monkeypatch.setattr(process_end.os, "_exit", codes.append)
    monkeypatch.setattr(process_end, "_ending", threading.Semaphore(99))  # one process stands for several
    monkeypatch.setattr(process_end.threading, "Timer", lambda *args: threading.Thread(target=lambda: None))
    return codes


class Job:
    """Members of one job in this process: watchdogs that look after each other, or ends that a test speaks for."""

    def __init__(self, size):
        self.stars = stars_of(size)
        self.watchdogs = []
        self._heartbeats = itertools.count(1)

    def watch(self, number, timeout_secs=0.8, has_started=True):
        one = watchdog.Watchdog(timeout_secs, self.stars[number])
        self.watchdogs.append(one)
        if has_started:
            one.started()
        return one

    def watch_all(self, timeout_secs=0.8):
        return [self.watch(number, timeout_secs) for number in range(len(self.stars))]

    def say(self, number, step, phase, diagnosis=""):
        self.stars[number].tell({"report": [next(self._heartbeats), step, step, phase, diagnosis]})

    def heard(self, number):
        """Returns the reports that a member without a watchdog has received."""
        return [message["report"] for _, message in self.stars[number].receive(0.01) if message]

    def end(self, number):
        """Does to the connections what the kernel does when a process ends."""
        for connection in self.stars[number].connections.values():
            with contextlib.suppress(OSError):
                connection._sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        for one in reversed(self.watchdogs):
            one.stop()
        for star in reversed(self.stars):  # the first waits for the others
            star.close()


@pytest.fixture
def job(exits, monkeypatch):
    """A function that returns the members of a job, which are ended after the test."""
    jobs = []

    def exit_member(code):
        exits.append(code)
        for each in jobs:
            for one in each.watchdogs:
                if one._thread is threading.current_thread():
                    each.end(one._process)

    monkeypatch.setattr(process_end.os, "_exit", exit_member)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with contextlib.ExitStack() as stack:
        def start(size):
            jobs.append(stack.enter_context(contextlib.closing(Job(size))))
            return jobs[-1]

        yield start


@pytest.fixture
def quick_heartbeats(monkeypatch):
    """Makes processes with a long limit report as often as those with a short one."""
    monkeypatch.setattr(diagnosis, "_MAX_HEARTBEAT_SECS", HEARTBEAT_SECS)


def said(capfd):
    return capfd.readouterr().err


@pytest.mark.usefixtures("quick_heartbeats")
def test_processes_say_what_they_do_and_that_they_stop(job, exits):
    pair = job(2)
    one = pair.watch(1, LONG_SECS)
    one.progress(5, "data")
    until(lambda: [report[1:] for report in pair.heard(0)][-1:] == [[1, 5, "data", ""]])
    one.stop()
    one.stop()
    assert pair.heard(0)[-1][3] == "stopped"
    assert exits == []


@pytest.mark.slow
def test_processes_that_go_on_are_left_alone(job, exits):
    trio = job(3).watch_all(0.4)
    for step in range(60):
        for one in trio:
            one.progress(step, "host")
        time.sleep(0.01)
    assert exits == []


@pytest.mark.slow
def test_the_stack_of_the_main_thread_follows_what_is_wrong(job, exits, capfd):
    pair = job(2)
    one = pair.watch(0)
    one.progress(4, "device")
    pair.say(1, 3, "host")
    until(lambda: exits == [75])
    err = said(capfd)
    assert re.match(r"\nWatchdog: worker 1 is lost: nothing was heard of it for (\d+\.\d) s\. It was at step 3, in "
                    r'"host", up to \1 s ago\. Worker 0 ends at step 4 with exit code 75; its main thread is ', err)
    assert "in test_the_stack_of_the_main_thread_follows_what_is_wrong\n    until(" in err


@pytest.mark.slow
def test_the_end_of_a_process_is_told_at_once_with_its_last_place(job, exits, capfd):
    trio = job(3)
    trio.watch(0, LONG_SECS)
    trio.watch(2, LONG_SECS)
    trio.say(1, 3, "host")
    time.sleep(0.4)
    trio.end(1)
    until(lambda: exits == [75, 75])
    err = said(capfd)
    lost = r'worker 1 is lost: its process has ended\. It was at step 3, in "host", up to \d+\.\d s ago'
    assert len(re.findall(lost, err)) == 2
    assert "Worker 0 ends at step 0 with exit code 75" in err and "Worker 2 ends at step 0 with exit code 75" in err


def test_the_end_of_process_0_is_told_to_all_others(job, exits, capfd):
    trio = job(3)
    for number in (1, 2):
        trio.watch(number, LONG_SECS)
    trio.say(0, 3, "host")
    time.sleep(0.1)
    trio.end(0)
    until(lambda: exits == [75, 75])
    lost = "worker 0, which coordinates the job, is lost: its process has ended. It was at step 3"
    assert said(capfd).count(lost) == 2


@pytest.mark.slow
def test_who_leaves_in_peace_is_not_missed(job, exits):
    trio = job(3).watch_all(0.4)
    for one in (trio[2], trio[0]):
        one.stop()
        time.sleep(0.4)
    assert exits == []


def test_who_fails_says_why_to_all_others(job, exits, capfd):
    trio = job(3)
    trio.watch_all(LONG_SECS)
    trio.watchdogs[1].progress(7, "host")
    trio.watchdogs[1].fail(ValueError("a row\x1b[2J is not there\nmore"))
    trio.end(1)
    until(lambda: sorted(exits) == [1, 75, 75])
    err = said(capfd)
    assert err.count("worker 1 has failed at step 7: ValueError: a row\\x1b[2J is not there. Worker ") == 2


def test_who_has_failed_before_jax_started_ends_when_the_others_have(job, exits, capfd):
    pair = job(2)
    one = pair.watch(1, LONG_SECS, has_started=False)
    one.fail(RuntimeError("no device."))
    assert pair.heard(0)[-1][3:] == ["start", "worker 1 has failed while JAX started: RuntimeError: no device."]
    time.sleep(0.1)
    assert exits == []
    pair.end(0)
    until(lambda: exits == [1])
    assert said(capfd).startswith("\nWatchdog: worker 1 has failed while JAX started: RuntimeError: no device, and the "
                                  "others have ended. Worker 1 ends with exit code 1; its main thread is here")


@pytest.mark.slow
def test_a_process_whose_script_has_ended_leaves_as_the_cause_if_others_needed_it(job, exits, capfd):
    trio = job(3).watch_all(1.6)
    for one, step in zip(trio, (5, 3, 5), strict=True):
        one.progress(step, "device")
    trio[1]._finish()
    until(lambda: sorted(exits) == [1, 75, 75])
    err = said(capfd)
    left = r"worker 1 has left the job: its script has ended, at step 3, while worker [02] waits \(step 5, "
    assert len(re.findall(left, err)) == 3
    assert "Worker 1 ends with exit code 1; its script had ended." in err


@pytest.mark.slow
@pytest.mark.usefixtures("quick_heartbeats")
def test_if_a_collective_has_failed_process_0_waits_less_for_who_is_silent(job, exits, capfd):
    trio = job(3)
    _, last = trio.watch(0, LONG_SECS), trio.watch(2, LONG_SECS)
    trio.say(1, 3, "host")
    threading.Thread(target=last.await_diagnosis).start()
    until(lambda: exits == [75, 75])
    err = said(capfd)
    assert err.count('worker 1 is lost: nothing was heard of it for ') == 2
    assert "Worker 2 ends at step 0 with exit code 75; after the error above." in err


@pytest.mark.slow
def test_jax_that_does_not_start_is_told_with_the_worker_in_which(job, exits, capfd):
    trio = job(3)
    for number in range(3):
        trio.watch(number, has_started=number != 1)
    until(lambda: exits == [75] * 3)
    assert said(capfd).count("JAX has not started within 0.8 s in worker 1. Worker ") == 3


@pytest.mark.parametrize(("ends", "why"), [(True, "its process has ended"),
                                           (False, r"nothing was heard of it for \d+\.\d s")])
def test_a_process_that_ends_or_falls_silent_while_jax_starts_is_named(job, exits, capfd, ends, why):
    pair = job(2)
    pair.watch(1, 0.4, has_started=False)
    if ends:
        pair.end(0)
    until(lambda: exits == [75])
    assert re.search(rf"worker 0, which coordinates the job, is lost: {why}, while JAX started\. Worker 1 ends with "
                     r"exit code 75; its main thread is here:", said(capfd))


@pytest.mark.usefixtures("quick_heartbeats")
def test_the_watch_ends_with_jax_s_runtime(job, exits, monkeypatch):
    pair = job(2)
    one = pair.watch(1, LONG_SECS)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    until(lambda: not one._thread.is_alive())
    assert pair.heard(0)[-1][3] == "stopped" and exits == []


@pytest.mark.slow
def test_a_connection_that_the_network_cuts_is_no_end(job, exits, capfd):
    pair = job(2)
    one = pair.watch(1, 0.8)
    pair.stars[1].connections[0].is_cut = True
    pair.end(0)
    until(lambda: exits == [75])
    one.stop()
    assert "worker 0, which coordinates the job, is lost: nothing was heard of it for " in said(capfd)


@pytest.mark.slow
def test_what_others_report_is_escaped(job, exits, capfd):
    pair = job(2)
    pair.watch(0, 0.4)
    pair.say(1, 3, "\x1b[2J\nWatchdog: x")
    pair.stars[1].tell({"report": [1, 2, 3]})  # of another form
    until(lambda: exits == [75])
    assert 'It was at step 3, in "\\x1b[2J\\nWatchdog: x", up to ' in said(capfd)


@pytest.mark.slow
def test_awaiting_a_diagnosis_ends_if_nobody_is_lost(job, exits):
    pair = job(2).watch_all(1.6)
    pair[0].await_diagnosis()
    assert exits == []
    for one in pair:
        one.stop()
    pair[0].await_diagnosis()


def test_a_main_thread_that_awaits_a_diagnosis_lets_the_watchdog_end_the_process(job, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def end_process(*arguments):
        begun.set()
        time.sleep(0.3)  # prints, and waits until the others have ended
        ended.set()

    monkeypatch.setattr(watchdog, "end_process", end_process)
    pair = job(2)
    one = pair.watch(0, LONG_SECS)
    pair.say(1, 3, "host")
    pair.end(1)
    assert begun.wait(GUARD_SECS)
    one.await_diagnosis(0.01)
    assert ended.is_set()


def test_a_failed_collective_where_nobody_is_lost_is_told_to_the_others(exits, monkeypatch):
    told = []
    monkeypatch.setattr(watchdog, "_current", SimpleNamespace(
        await_diagnosis=lambda: told.append("nobody is lost"), fail=told.append))
    error = jax.errors.JaxRuntimeError("UNKNOWN: Gloo context initialization failed: timed out connecting")
    membership._exit_at_once(type(error), error, None)
    assert told == ["nobody is lost", error] and exits == [75]


def test_one_process_needs_no_watch_and_a_limit_is_positive():
    before = threading.active_count()
    one = Watchdog(1.0, *stars_of(1))
    one.progress(1, "data")
    one.await_diagnosis()
    one.fail(ValueError())
    one.stop()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match=r"`timeout_secs` must be a number above 0\. Received: timeout_secs=0"):
        Watchdog(0, SimpleNamespace())


def work(failing, how):
    """Three steps in each process, after which something happens to one; the others go on, or wait for it."""
    config = json.loads(os.environ["TF_CONFIG"])
    index = config["task"]["index"]
    if how == "own SIGKILL":
        jax.distributed.initialize(config["cluster"]["worker"][0], 2, index)
    diagnosis._MAX_HEARTBEAT_SECS = HEARTBEAT_SECS
    membership.join_cluster(LONG_SECS)
    one = watchdog.watchdog()
    ProcessGroup.of_all().any(False)  # both have started, which may take longer than the limit from now on
    if "SIGKILL" not in how:  # whose end is noticed at once
        one.timeout_secs = TIMEOUT_SECS
    for step in range(3):
        one.progress(step, "data")
        time.sleep(0.1)
        one.progress(step, "host")
    if how == "sleep":
        one.progress(3, "data" if index == failing else "device")
        time.sleep(LONG_SECS)
    elif how == "compile":
        one.progress(3, "compile" if index == failing else "device")
        if index == failing:
            time.sleep(1.4 * TIMEOUT_SECS)
        ProcessGroup.of_all().any(False)  # the others wait for it
    elif index == failing:
        sent = one._heartbeats
        until(lambda: one._heartbeats > sent + 1)  # the others get to know its last step
        os.kill(os.getpid(), getattr(signal, how.removeprefix("own ")))
    else:
        while True:
            one.progress(3, "host")
            time.sleep(0.1)
    return index


def run_without_launcher(how, failing):
    """Returns the code and the stderr of the worker that is left."""
    program = (f"import sys; sys.path[:] = {sys.path!r}; from tests.cluster import test_watchdog; "
               f"test_watchdog.work({failing}, {how!r})")
    left = 1 - failing
    lines = []
    with launch_job.Job(["-c", program], 2, 1, {"JAX_PLATFORMS": "cpu"},
             lambda worker, stream, new: lines.extend(new) if (worker, stream) == (left, "stderr") else None) as job:
        until(lambda: left in job.wait(0.05))
        job.wait(0.2)
    return job.codes[left], b"\n".join(lines).decode()


def assert_last_place(text, left):
    """Asserts that the worker that is left has said where the other was last, and where it is itself."""
    assert re.search(r'It was at step 2, in "host", up to \d+\.\d s ago\. '
                     rf"Worker {left} ends at step 3 with exit code 75", text)
    assert "test_watchdog.py" in text.partition("main thread is here:")[2]


@pytest.mark.processes
@pytest.mark.parametrize(("failing", "name", "how"), [
    (0, "worker 0, which coordinates the job,", "SIGKILL"), (1, "worker 1", "SIGKILL"),
    (1, "worker 1", "own SIGKILL")])  # the script has started JAX itself
def test_a_process_that_is_killed_is_named_at_once(failing, name, how):
    code, text = run_without_launcher(how, failing)
    assert code == 75, text  # not by SIGABRT, though JAX aborts those that lose process 0
    assert f'Watchdog: {name} is lost: its process has ended. ' in text
    assert_last_place(text, 1 - failing)


@pytest.mark.processes
@pytest.mark.parametrize(("failing", "says"), [
    (0, "worker 0, which coordinates the job, is lost: nothing was heard of it for "),
    (1, "worker 1 is lost: nothing was heard of it for "),
])
def test_a_process_that_is_suspended_is_named(failing, says):
    code, text = run_without_launcher("SIGSTOP", failing)
    assert code == 75, text
    silent_secs = re.search(rf"Watchdog: {says}(\d+\.\d) s", text)[1]
    assert float(silent_secs) > 0.7 * TIMEOUT_SECS, "not before most of its limit is over"
    assert_last_place(text, 1 - failing)


@pytest.mark.processes
def test_a_worker_stuck_in_its_data_is_named_by_all(capfd):
    with pytest.raises(WorkerError) as caught:
        LocalCluster(2).run(work, 1, "sleep")
    assert caught.value.exit_code == 75
    err = capfd.readouterr().err
    for index in range(2):
        assert f"Worker {index} ends at step 3 with exit code 75; its main thread is here" in err
    assert err.count('worker 1 has stalled at step 3, in "data" for ') == 2
    assert err.count("while worker 0 waits (step 3, \"device\")") == 2
    assert err.count("time.sleep(LONG_SECS)") == 2


@pytest.mark.processes
def test_a_healthy_run_ends_well_though_one_compiles_for_long():
    assert LocalCluster(2).run(work, 1, "compile") == [0, 1]
