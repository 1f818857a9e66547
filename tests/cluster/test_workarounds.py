"""Each workaround is still needed with the JAX that is installed, and can be turned off."""

import json
import os
import signal
import subprocess
import sys

import jax
import pytest

from tests.support.rendezvous_cluster import free_port
from tests.support.waiting import GUARD_SECS

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

LOSES_PROCESS_0 = """
import os, sys, time
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), heartbeat_timeout_seconds=60)
jax.devices()
if sys.argv[2] == "0":
    os.kill(os.getpid(), 9)
time.sleep(999)
"""

STATE = """
import os, sys, threading, time
from trainer.distribute.cluster import workarounds
workarounds.put_off_aborts()
with workarounds.threads_that_wait_their_turn(lambda: sys.argv[1] == "gloo"):
    threads = [threading.Thread(target=time.sleep, args=(99,), daemon=True) for _ in range(2)]
    [thread.start() for thread in threads]
found = {os.sched_getscheduler(thread.native_id) == os.SCHED_BATCH for thread in threads}
print(found, os.sched_getscheduler(0) == os.SCHED_OTHER, flush=True)
os.abort()
"""

JOINS = """
import os
import jax
from trainer.distribute.cluster import join_cluster
if os.environ["PRETENDED"]:
    jax.default_backend = lambda: os.environ["PRETENDED"]
join_cluster()
print(sum(os.sched_getscheduler(int(thread)) == os.SCHED_BATCH for thread in os.listdir("/proc/self/task")))
"""


def started(script, arguments, **environment):
    return [subprocess.Popen([sys.executable, "-c", script, *each], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env={**ENVIRONMENT, **variables})
            for each, variables in arguments]


def outputs_of(script, **environment):
    """Returns what each of two processes of a cluster has written."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = started(script, [([], {
        **environment,
        "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}),
    }) for index in range(2)])
    try:
        return [process.communicate(timeout=GUARD_SECS) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_jax_still_aborts_a_process_that_has_lost_process_0():
    address = f"127.0.0.1:{free_port()}"
    processes = started(LOSES_PROCESS_0, [([address, str(index)], {}) for index in range(2)])
    try:
        assert processes[1].wait(GUARD_SECS) == -signal.SIGABRT, processes[1].stderr.read()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_jax_still_has_no_public_client_of_its_key_value_store():
    public = {name for name in dir(jax.distributed) if not name.startswith("_")}
    assert public == {"initialize", "is_initialized", "shutdown"}


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "connects", "is_on", "waits"), [
    ("1", "gloo", True, True), ("1", "nccl", True, False), ("0", "gloo", False, False)])
def test_workarounds_can_be_turned_off(switch, connects, is_on, waits):
    (process,) = started(STATE, [([connects], {"TRAINER_WORKAROUNDS": switch})])
    try:
        assert process.stdout.readline() == f"{{{waits}}} True\n"
        if is_on:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)  # it sleeps in its handler
        else:
            assert process.wait(GUARD_SECS) == -signal.SIGABRT
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["", "gpu"])
def test_threads_wait_their_turn_only_where_devices_are_cpus(backend):
    outputs = [int(output) for output, _ in outputs_of(JOINS, PRETENDED=backend)]
    assert all(outputs) if backend == "" else not any(outputs)
