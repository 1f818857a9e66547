"""The other engine: parameter servers as actors of Ray, on this machine and as tasks of TF_CONFIG."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import trainer
from trainer import distribute
from trainer.distribute.cluster import PEER_LOST
from trainer.distribute.parameter_server.processes import tf_config_cluster

# In processes of their own: Ray keeps the first token, and leaves threads. A busy machine fails to start it in time.
LOCAL = """
import os, signal
import jax.numpy as jnp
import numpy as np
from tests.distribute.test_parameter_server_failures import made, rows
from trainer import callbacks, distribute

def fails():
    raise ValueError("boom")

if __name__ == "__main__":
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=1, address="local") as strategy:
        coordinator = strategy.coordinator
        pids = set(coordinator.fetch([coordinator.schedule(os.getpid) for _ in range(8)]))

        class Kill(callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    os.kill(min(pids), signal.SIGKILL)

        model = made(strategy)
        model.fit(*rows(), batch_size=8, epochs=3, verbose=0, callbacks=[Kill()])
        assert int(model.state.step) == 24
        np.testing.assert_allclose(model.state.params["w"], 3.0, rtol=1e-6)
        coordinator.schedule(fails)
        try:
            coordinator.join()
        except ValueError as error:
            assert "boom" in str(error)
        written = coordinator.schedule(lambda x: x.__setitem__(0, 5.0) or x, (np.zeros(100_000),)).fetch()
        written[0] += 1
        assert written[0] == 6.0
    print("done")
"""
TASK = """
import sys
from tests.distribute.test_parameter_server_failures import made, rows
from trainer import distribute

with distribute.ParameterServerStrategy() as strategy:
    model = made(strategy)
    model.fit(*rows(), batch_size=8, epochs=2, verbose=0)
    print("step", int(model.state.step))
    sys.exit(5)
"""


def start(script, **variables):
    if importlib.util.find_spec("ray") is None:  # not imported here, where it would set environment variables
        pytest.skip("Ray is not installed.")
    root = pathlib.Path(trainer.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), **variables}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_cluster_on_this_machine_trains_each_row_once_though_a_worker_is_killed():
    output, problems = (process := start(LOCAL)).communicate(timeout=300)
    assert process.returncode == 0 and output.endswith("done\n"), problems


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_tasks_of_a_cluster_meet_and_end_with_the_chief(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    cluster = {role: [free_address()] for role in ("chief", "worker", "ps")}
    tasks = {role: start(TASK, RAY_AUTH_TOKEN_PATH=str(token), TF_CONFIG=json.dumps(
        {"cluster": cluster, "task": {"type": role, "index": 0}})) for role in cluster}
    ended = {role: (*process.communicate(timeout=400), process.returncode) for role, process in tasks.items()}
    assert {role: code for role, (_, _, code) in ended.items()} == dict.fromkeys(cluster, 5), ended
    assert ended["chief"][0] == "step 16\n" and ended["worker"][0] == ""


@pytest.mark.parametrize(("cluster", "role", "message"), [
    ({"worker": ["a:1"], "ps": ["b:1"]}, "worker", r"needs a chief.*has only: worker, ps"),
    ({"worker": ["a:1"]}, "worker", r"a chief.* and parameter servers.*only: worker\..*'chief', 'ps'.*common token"),
    ({"chief": ["a:1"], "ps": ["b:1"]}, "chief", r"needs workers"),
    ({"chief": ["a:1"], "worker": ["b:1"]}, "chief", r"needs parameter servers"),
    ({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "chief", r"common token.*RAY_AUTH_TOKEN_PATH"),
    ({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "evaluator", r"`trainer.distribute.SidecarEvaluator`"),
])
def test_a_cluster_that_lacks_something_is_refused_before_any_network_call(cluster, role, message, monkeypatch):
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    resolver = distribute.TFConfigClusterResolver({"cluster": cluster, "task": {"type": role, "index": 0}})
    with pytest.raises(distribute.ClusterError, match=message):
        distribute.ParameterServerStrategy(resolver)
    with pytest.raises(ValueError, match="Leave out `num_workers`"):
        distribute.ParameterServerStrategy(resolver, num_workers=2)


@pytest.fixture
def nodes(monkeypatch):
    """Starts programs that live until their input ends in the place of Ray's nodes, and returns them."""
    started = []

    def start_node(*arguments):
        started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(tf_config_cluster, "_start_node", start_node)
    yield started
    for node in started:
        node.stdin.close()
        node.wait()


@pytest.mark.slow
def test_a_task_comes_before_its_chief_and_ends_with_its_exit_code(nodes):
    address = free_address()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        code = threads.submit(tf_config_cluster.serve, address, "worker 0")
        time.sleep(0.3)  # the task finds nobody at first
        chief = tf_config_cluster.Chief(address, ["worker 0"])
        chief.wait_for_nodes(lambda: {tf_config_cluster.resource_of("worker 0"): 1} if len(nodes) == 2 else {})
        chief.close(5)
        assert code.result(60) == 5
    assert all(node.poll() is not None for node in nodes)


def test_a_task_ends_with_the_code_of_a_lost_chief_when_its_node_ends(nodes, caplog):
    address = free_address()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        chief = tf_config_cluster.Chief(address, ["worker 0"])
        code = threads.submit(tf_config_cluster.serve, address, "worker 0")
        chief.wait_for_nodes(lambda: {tf_config_cluster.resource_of("worker 0"): 1} if len(nodes) == 2 else {})
        nodes[1].kill()
        assert code.result(60) == PEER_LOST
        chief.close(0)
    assert "worker 0 ends: Ray has ended on this machine" in caplog.text


def connected(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def is_closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_connections_that_say_nothing_are_few_and_do_not_last(nodes, monkeypatch):
    monkeypatch.setattr(tf_config_cluster, "_POLL", 0.01)
    monkeypatch.setattr(tf_config_cluster, "_MAX_UNKNOWN", 3)
    address = free_address()
    chief = tf_config_cluster.Chief(address, ["worker 0"])
    with concurrent.futures.ThreadPoolExecutor() as threads, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(address)) for _ in range(8)]
        assert all(is_closed(stranger) for stranger in strangers[:5])
        assert len(chief._unknown) == 3
        code = threads.submit(tf_config_cluster.serve, address, "worker 0")
        chief.wait_for_nodes(lambda: {tf_config_cluster.resource_of("worker 0"): 1} if len(nodes) == 2 else {})
        rude = [stack.enter_context(connected(address)) for _ in range(2)]
        rude[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        rude[1].sendall(json.dumps({"task": "worker 7"}).encode() + b"\n")
        assert all(map(is_closed, rude))
        monkeypatch.setattr(tf_config_cluster, "_HELLO_SECS", 0.0)
        assert all(map(is_closed, strangers))
        chief.close(5)
        assert code.result(60) == 5


CHIEF_OF_FEW_DESCRIPTORS = """
import logging, resource, subprocess, sys, threading
from trainer.distribute.parameter_server.processes import tf_config_cluster as cluster

logging.basicConfig()
nodes = []
def start_node(*arguments):
    nodes.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
    return nodes[-1]
cluster._start_node = start_node
cluster._HELLO_SECS, cluster._MAX_UNKNOWN = 600.0, 600  # so that only the descriptors are a limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
chief = cluster.Chief(sys.argv[1], ["worker 0"])
print("listens", flush=True)
sys.stdin.readline()
chief.close(5)
"""


@pytest.mark.slow
def test_a_chief_whose_descriptors_are_taken_by_strangers_says_so_and_lets_its_task_in(nodes):
    address = free_address()
    with (concurrent.futures.ThreadPoolExecutor() as threads, contextlib.ExitStack() as stack,
          subprocess.Popen([sys.executable, "-c", CHIEF_OF_FEW_DESCRIPTORS, address], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chief):
        assert chief.stdout.readline() == "listens\n"
        for _ in range(200):
            stack.enter_context(connected(address))
        code = threads.submit(tf_config_cluster.serve, address, "worker 0")
        while not nodes and not code.done():  # its own, which it starts when it has been let in
            time.sleep(0.01)
        _, errors = chief.communicate("close\n", timeout=60)
        assert code.result(60) == 5
        assert errors.count("has no file descriptor for it: Too many open files. Raise the limit") == 1


def wait_for_tasks(address):
    chief = tf_config_cluster.Chief(address, ["ps 0", "ps 1"])
    try:
        chief.wait_for_nodes(dict)
    finally:
        chief.close(0)


@pytest.mark.sampled
@pytest.mark.parametrize(("make", "message"), [
    (lambda address: tf_config_cluster.serve(address, "worker 0"),
     r"worker 0 has not reached the chief at .* within 0.5 s: connection refused, nothing listens on port"),
    (wait_for_tasks, r"ps 0, ps 1 did not come within 0.5 s. Start the same script with the TF_CONFIG of that task"),
], ids=["the chief", "the tasks"])
def test_a_wait_for_others_says_so_and_ends_with_their_names(nodes, monkeypatch, capsys, make, message):
    monkeypatch.setattr(tf_config_cluster, "_PATIENCE", 0.5)
    monkeypatch.setattr(tf_config_cluster, "_SAY", 0.1)
    with pytest.raises(distribute.ClusterTimeout, match=message):
        make(free_address())
    assert re.search(r"waits for .*\. \(0 s of 0\.5 s\)", capsys.readouterr().err)
