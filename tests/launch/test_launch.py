"""The launcher runs a script as a cluster, shows what it writes, and leaves no process behind, however it ends."""

import collections
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import GUARD_SECS, LONG_SECS, until
from trainer import launch
from trainer.launch import command as launch_command
from trainer.launch import job, output, parent_death
from trainer.launch.job import Job
from trainer.launch.supervisor import supervise

WORKER = """
import json, os, signal, subprocess, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def note(name, text):
    with open(name + ".new", "w") as file:
        file.write(str(text))
    os.rename(name + ".new", name)
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def wait_for_the_end_of(name):  # which the launcher has seen
    wait_for(name)
    while os.path.exists("/proc/" + open(name).read()):
        time.sleep(0.01)
"""
LAUNCHER = """
import signal
# Whatever the tests' own parent does with them, such as nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import sys
from trainer import launch
"""
# One process that stays in the worker's group and one in a session of its own, both of them deaf to SIGTERM.
HELPERS = WORKER + """
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(999)"
helpers = [subprocess.Popen([sys.executable, "-c", deaf], start_new_session=alone, stdout=subprocess.PIPE)
           for alone in (False, True)]
for helper in helpers:
    helper.stdout.read(1)
note(f"pids_{index}", " ".join(map(str, [os.getpid(), *(helper.pid for helper in helpers)])))
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)


def run(source, *arguments, workers=2, **options):
    return launch_command.run(["-c", WORKER + source, *arguments], workers, **options)


@contextlib.contextmanager
def launcher(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER + "sys.exit(launch.main(sys.argv[1:]))", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def script(source, name="worker.py"):
    pathlib.Path(name).write_text(WORKER + source)
    return name


def is_alive(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # who adopted it may never reap it


def noted_pids(workers=2):
    names = [f"pids_{index}" for index in range(workers)]
    until(lambda: all(map(os.path.exists, names)))
    return [int(pid) for name in names for pid in pathlib.Path(name).read_text().split()]


def without_any(pids):
    return not any(map(is_alive, pids))


def test_each_worker_gets_its_place_in_one_cluster_and_the_arguments(capfd):
    source = "print(json.dumps([os.environ['TF_CONFIG'], os.environ['TRAINER_JOB_ID'], sys.argv[1:], os.getcwd()]))"
    assert run(source, "--workers", "x", workers=3) == 0
    output = sorted(capfd.readouterr().out.splitlines())
    found = [json.loads(line.removeprefix(f"[worker {index}] ")) for index, line in enumerate(output)]
    configs = [json.loads(config) for config, *_ in found]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": index} for index in range(3)]
    assert configs[0]["cluster"] == configs[1]["cluster"] == configs[2]["cluster"]
    hosts, ports = zip(*(address.split(":") for address in configs[0]["cluster"]["worker"]), strict=True)
    assert set(hosts) == {"localhost"} and len(set(ports)) == 3
    assert len({job_id for _, job_id, *_ in found}) == 1 and len(found[0][1]) == 32
    assert all(rest == [["--workers", "x"], os.getcwd()] for *_, rest in
               [(config, job_id, [arguments, folder]) for config, job_id, arguments, folder in found])


def test_the_number_of_devices_replaces_that_of_the_environment(capfd):
    flags = "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2"
    for devices, expected in ((3, "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=3"), (None, flags)):
        assert run("print(os.environ['XLA_FLAGS'])", workers=1, devices_per_worker=devices,
                   env={"XLA_FLAGS": flags}) == 0
        assert capfd.readouterr().out == f"[worker 0] {expected}\n"


def test_lines_come_whole_with_a_prefix_and_to_the_stream_they_were_written_to(capfd):
    source = """
for number in range(300):
    for part in (f"{index} ", f"line {number} ", "x" * 50, "\\n"):
        sys.stdout.write(part)
        sys.stderr.write(part)
"""
    assert run(source, workers=3) == 0
    expected = collections.Counter(f"[worker {index}] {index} line {number} {'x' * 50}"
                                   for index in range(3) for number in range(300))
    output, errors = capfd.readouterr()
    assert collections.Counter(output.splitlines()) == collections.Counter(errors.splitlines()) == expected
    first = [line for line in output.splitlines() if line.startswith("[worker 0]")]
    assert first == [f"[worker 0] 0 line {number} {'x' * 50}" for number in range(300)]


def test_junk_bars_and_a_last_line_without_an_end_are_shown(capfdbinary):
    source = r"""
os.write(1, b"\xff\x00\x1b[1m\xc3\n\n 5%\r10%\r100%\nwindows\r\nno end")
"""
    assert run(source, workers=1) == 0
    lines = [b"\xff\x00\x1b[1m\xc3", b"", b"100%", b"windows", b"no end"]
    assert capfdbinary.readouterr().out == b"".join(b"[worker 0] " + line + b"\n" for line in lines)


def test_a_bar_that_goes_on_for_long_is_shown_now_and_then_and_takes_no_memory(monkeypatch):
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    splitter, shown = output.LineSplitter(), []
    for percent in range(100):
        now += 1
        shown += splitter.feed(f"\r{percent}% {'=' * 50}".encode())
        assert len(splitter._pending) < 200
    assert [line.split()[0] for line in shown] == [f"{percent}%".encode() for percent in range(9, 100, 10)]


def test_a_line_without_end_is_shown_in_parts():
    splitter = output.LineSplitter()
    parts = [part for _ in range(40) for part in splitter.feed(b"x" * 2**16)] + splitter.rest()
    assert b"".join(parts) == b"x" * (40 * 2**16) and len(parts) == 3


def test_output_goes_to_streams_of_text_too(monkeypatch):
    written = []
    stream = type("Notebook", (), {"write": lambda self, text: written.append(text), "flush": lambda self: None})()
    monkeypatch.setattr(sys, "stdout", stream)
    output.show(4, "stdout", [b"caf\xc3\xa9", b"\xff"])
    assert "".join(written) == "[worker 4] café\n[worker 4] \ufffd\n"


def test_when_a_worker_fails_the_others_end_and_its_traceback_comes_last(capfd):
    source = """
if index == 1:
    wait_for("ready")
    try:
        {}["first"]
    except KeyError:
        raise ValueError("no such thing")
signal.signal(signal.SIGTERM, lambda *_: (print("ending", file=sys.stderr), sys.exit(1)))
note("ready", "")
time.sleep(999)
"""
    assert run(source) == 1
    errors = capfd.readouterr().err.splitlines()
    heading = errors.index("[launcher] The end of worker 1's stderr:")
    assert errors.index("[worker 0] ending") < heading
    assert errors[heading + 1] == "[worker 1] Traceback (most recent call last):"
    assert "[worker 1] KeyError: 'first'" in errors[heading:]
    assert errors[-2:] == ["[worker 1] ValueError: no such thing", "[launcher] Worker 1 of 2 failed with exit code 1."]


def test_of_several_tracebacks_only_those_that_belong_together_are_shown_again():
    head, chain = (b"Traceback (most recent call last):",
                   b"During handling of the above exception, another exception occurred:")
    lines = [head, b"Logged: only a warning", b"step", head, b"KeyError: 1", b"", chain, b"", head, b"ValueError: 2"]
    assert output.end_of(lines) == lines[3:]
    at_exit = [b"Exception ignored in: <function File.__del__ at 0x7f>", head, b"OSError: closed"]
    assert output.end_of([*lines, *at_exit]) == [*lines[3:], *at_exit]
    assert output.end_of([b"%d" % number for number in range(50)]) == [b"%d" % n for n in range(30, 50)]


@pytest.mark.slow
@pytest.mark.parametrize(("exits", "code", "says"), [
    (["sys.exit(75)", "time.sleep(0.3); sys.exit(3)"], 3, "Worker 1 of 2 failed with exit code 3."),
    (["os.abort()", "time.sleep(0.3); os.kill(os.getpid(), 9)"], 137, "Worker 1 of 2 was killed by SIGKILL."),
    (["os.abort()", "sys.exit(0)"], 75, "Worker 0 of 2 was aborted (SIGABRT), as JAX's runtime does"),
    (["sys.exit(0)", "sys.exit(75)"], 75, "Worker 1 of 2 failed with exit code 75 (it lost a peer)."),
    (["note('pid', os.getpid()); sys.exit(143)", "wait_for_the_end_of('pid'); sys.exit(143)"], 143,
     "Worker 0 of 2 failed with exit code 143 (preempted)."),
    (["os.kill(os.getpid(), 40)", "time.sleep(999)"], 168, "Worker 0 of 2 was killed by signal 40."),
])
def test_the_exit_code_is_that_of_the_failure_which_came_first(exits, code, says, capfd, monkeypatch):
    monkeypatch.setattr("trainer.launch.supervisor._PEER_LOST_WAIT_SECS", LONG_SECS)
    assert run(f"exec({exits!r}[index])") == code
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[launcher]")]
    assert says in said.pop(-2 if code > 3 else -1)
    assert code == 3 or "`--restarts N` and the callback `BackupAndRestore`" in said[-1]


def test_workers_that_lost_a_peer_do_not_wait_for_long(monkeypatch):
    monkeypatch.setattr("trainer.launch.supervisor._PEER_LOST_WAIT_SECS", 0.2)
    assert run("sys.exit(75) if index else time.sleep(999)", timeout_secs=GUARD_SECS) == 75


def test_workers_that_do_not_end_are_killed_and_all_that_they_started(monkeypatch):
    with Job(["-c", HELPERS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait_for('go')\ntime.sleep(999 * index)\n"
              "sys.exit(7)"], 2) as job:
        pids = noted_pids()
        assert len(pids) == 6 and all(map(is_alive, pids))
        pathlib.Path("go").touch()
        outcome = supervise(job, failure_grace_secs=0.3)
        assert without_any(pids)
    assert (outcome.exit_code, outcome.worker, outcome.killed) == (7, 0, (1,))


def test_what_workers_leave_running_ends_with_a_job_that_succeeds():
    assert launch_command.run(["-c", HELPERS], 2) == 0
    until(lambda: without_any(noted_pids()))


@pytest.mark.slow
@pytest.mark.parametrize("with_guard", [True, False])
def test_no_process_outlives_a_launcher_that_is_killed(with_guard):
    pathlib.Path("worker.py").write_text(HELPERS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(999)")
    with launcher("--workers", "2", "worker.py") as process:
        pids = noted_pids()
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        guards = set(map(int, children)) - set(pids)
        assert len(guards) == 1
        if not with_guard:  # then the kernel still ends the workers
            for guard in guards:
                os.kill(guard, signal.SIGKILL)
        process.kill()
        if not with_guard:
            until(lambda: without_any([pids[0], pids[3]]))
            for pid in set(pids) - {pids[0], pids[3]}:
                os.kill(pid, signal.SIGKILL)
        until(lambda: without_any([*pids, *guards]))


def test_a_worker_whose_launcher_is_gone_already_does_not_start():
    parent = str(os.getppid())  # not the one that starts it here
    done = subprocess.run([sys.executable, parent_death.__file__, "tie", parent, sys.executable, "-c", "print(1)"],
                          capture_output=True, timeout=GUARD_SECS)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.slow
def test_sigterm_reaches_all_workers_once_and_their_143_is_returned_without_a_restart():
    name = script("""
def save(*_):
    note(f"saved_{index}_{time.monotonic_ns()}", "")
    wait_for("terminated again")
    time.sleep(0.3)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
note(f"pids_{index}", os.getpid())
time.sleep(999)
""")
    with launcher("--workers", "2", "--restarts", "3", name) as process:
        noted_pids()
        process.terminate()
        until(lambda: len(list(pathlib.Path().glob("saved_?_*[0-9]"))) == 2)
        process.terminate()
        pathlib.Path("terminated again").touch()
        _, errors = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 143
    assert b"[launcher]" not in errors
    assert sorted(path.name[:7] for path in pathlib.Path().glob("saved*")) == ["saved_0", "saved_1"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_workers_deaf_to_sigterm_are_killed_after_the_grace_period(number):
    name = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(f'pids_{index}', os.getpid())\ntime.sleep(999)")
    with launcher("--workers", "2", "--grace", "0.3", name) as process:
        pids = noted_pids()
        process.send_signal(number)
        _, errors = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 137
    assert b"[launcher] Killed, as they did not end in time: 0, 1." in errors
    assert without_any(pids)


def test_a_worker_that_fails_while_it_saves_gives_the_exit_code():
    name = script("""
def save(*_):
    raise OSError("disk full") if index else SystemExit(143)
signal.signal(signal.SIGTERM, save)
note(f"pids_{index}", os.getpid())
time.sleep(999)
""")
    with launcher("--workers", "2", name) as process:
        noted_pids()
        process.terminate()
        _, errors = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 1
    assert errors.endswith(b"[worker 1] OSError: disk full\n[launcher] Worker 1 of 2 failed with exit code 1.\n")


def test_ctrl_c_reaches_all_workers_and_gives_130():
    name = script("note(f'pids_{index}', os.getpid())\ntime.sleep(999)")
    with launcher("--workers", "2", "--restarts", "2", name) as process:
        pids = noted_pids()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 130
    assert b"[worker 0] KeyboardInterrupt" in errors and b"[worker 1] KeyboardInterrupt" in errors
    assert b"Starting" not in errors and without_any(pids)


@pytest.mark.slow
def test_a_second_ctrl_c_kills():
    name = script("signal.signal(signal.SIGINT, lambda *_: note(f'asked_{index}', ''))\n"
                  "note(f'pids_{index}', os.getpid())\nwhile True: time.sleep(1)")
    with launcher("--workers", "2", name) as process:
        pids = noted_pids()
        process.send_signal(signal.SIGINT)
        until(lambda: os.path.exists("asked_0") and os.path.exists("asked_1"))
        assert all(map(is_alive, pids))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 130 and without_any(pids)


def test_workers_end_when_nobody_reads_their_output():
    name = script("note(f'pids_{index}', os.getpid())\nwhile True: print('x' * 99)")
    with launcher("--workers", "2", name) as process:
        pids = noted_pids()
        process.stdout.close()
        assert process.wait(GUARD_SECS) == 143
        assert without_any(pids)
        assert process.stderr.read() == b""
        process.stdout = None


def test_signal_handlers_are_as_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run("pass", workers=1) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_after_a_failure_all_start_again_on_other_ports_with_another_job_id(capfd):
    source = """
attempt = len([name for name in os.listdir() if name.startswith(f"attempt_{index}_")])
note(f"attempt_{index}_{attempt}", os.environ["TRAINER_JOB_ID"] + os.environ["TF_CONFIG"])
wait_for(f"attempt_{1 - index}_{attempt}")
if attempt < 2:
    os.kill(os.getpid(), 9) if index else time.sleep(999)
"""
    assert run(source, restarts=3) == 0
    assert len({pathlib.Path(f"attempt_1_{attempt}").read_text()[:32] for attempt in range(3)}) == 3
    assert len({pathlib.Path(f"attempt_1_{attempt}").read_text()[32:] for attempt in range(3)}) == 3
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[launcher]")]
    assert said == ["[launcher] Worker 1 of 2 was killed by SIGKILL.",
                    "[launcher] Starting all workers again (restart 1 of 3).",
                    "[launcher] Worker 1 of 2 was killed by SIGKILL.",
                    "[launcher] Starting all workers again (restart 2 of 3)."]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "restarts", "starts"), [(1, 2, 3), (1, 0, 1), (2, 2, 1), (75, 1, 2), (143, 1, 2)])
def test_restarts_are_counted_and_none_follows_a_refused_configuration(code, restarts, starts, capfd):
    assert run(f"print('start'); sys.exit({code})", workers=1, restarts=restarts) == code
    assert capfd.readouterr().out.count("start") == starts


def test_time_that_is_over_ends_all_with_124_and_without_a_restart(capfd):
    assert run("time.sleep(999)", timeout_secs=0.5, restarts=2) == 124
    assert capfd.readouterr().err == "[launcher] The time is over.\n"


@pytest.mark.parametrize(("arguments", "says"), [
    (["worker.py"], "--workers"),
    (["--workers", "0", "worker.py"], "`workers` must be at least 1. Received: 0."),
    (["--workers", "two", "worker.py"], "invalid int value: 'two'"),
    (["--workers", "5000", "worker.py"], "`workers` must be at most 1024"),
    (["--workers", "2", "--devices-per-worker", "0", "worker.py"], "`devices_per_worker` must be at least 1"),
    (["--workers", "2", "--restarts", "-1", "worker.py"], "`restarts` must be at least 0. Received: -1."),
    (["--workers", "2", "--grace", "nan", "worker.py"], "`grace_secs` must be at least 0. Received: nan."),
    (["--workers", "2", "--timeout", "-1", "worker.py"], "`timeout_secs` must be at least 0. Received: -1.0."),
    (["--workers", "2", "--worker", "worker.py"], "unknown option '--worker'"),
    (["--workers", "2", "missing.py"], "There is no script 'missing.py' in "),
    (["--workers", "2"], "there is nothing to run. Give a script, or -m and a module"),
    (["--workers", "2", "-m"], "there is nothing to run. Give a script, or -m and a module"),
])
def test_arguments_that_make_no_sense_give_exit_code_2(arguments, says, capsys):
    script("")
    with pytest.raises(SystemExit) as exit:
        launch.main(arguments)
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"command": "worker.py"}, ValueError, "`command` must be a list"),
    ({"workers": 1.5}, TypeError, "`workers` must be a whole number. Received: a value of type float."),
    ({"restarts": True}, TypeError, "`restarts` must be a whole number. Received: a value of type bool."),
])
def test_wrong_arguments_of_the_function_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        launch_command.run(**{"command": ["-c", ""], "workers": 1, **options})


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("command", [["worker.py"], ["--", "worker.py"], ["-m", "worker"]])
def test_the_command_line_runs_scripts_and_modules_with_options_of_their_own(command, capfd):
    script("print(sys.argv[1:])")
    assert launch.main(["--workers", "1", *command, "--workers", "-m", "x", "--", "y"]) == 0
    assert capfd.readouterr().out == "[worker 0] ['--workers', '-m', 'x', '--', 'y']\n"


def test_the_module_runs_as_a_program():
    name = script("sys.exit(3 if index else 0)")
    done = subprocess.run([sys.executable, "-m", "trainer.launch", "--workers", "2", name], capture_output=True,
                          timeout=GUARD_SECS)
    assert done.returncode == 3
    assert done.stderr == b"[launcher] Worker 1 of 2 failed with exit code 3.\n"


def test_the_launcher_imports_neither_jax_nor_numpy():
    source = LAUNCHER + "print([name for name in ('jax', 'numpy', 'flax') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=GUARD_SECS).stdout == b"[]\n"


def test_ports_are_free_different_and_not_those_of_outgoing_connections():
    ports = job.free_ports(50)
    limit = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 50
    assert limit <= 10_000 or all(10_000 <= port < limit for port in ports)
