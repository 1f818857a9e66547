"""Clusters that JAX finds by itself: what Kubernetes or a TPU would tell it, a class of JAX's own kind tells here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launched_processes import outputs_of, variables_setter
from tests.support.rendezvous_cluster import free_port
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.cluster.description.detected_cluster import detected_cluster

PLACE = """
import os
from jax._src.clusters import ClusterEnv


class Place(ClusterEnv):
    name = "place"

    @classmethod
    def is_env_present(cls):
        return "PLACE" in os.environ

    @classmethod
    def get_coordinator_address(cls, timeout_secs, override_coordinator_port):
        return os.environ["PLACE_ADDRESS"]

    @classmethod
    def get_process_count(cls):
        return 2

    @classmethod
    def get_process_id(cls):
        return int(os.environ["PLACE"])
"""
SCRIPT = PLACE + """
import jax
import trainer
strategy = trainer.distribute.MultiWorkerMirroredStrategy(
    trainer.distribute.CommunicationOptions(timeout_seconds=float(os.environ["PLACE_TIMEOUT"])))
print(jax.process_index(), jax.process_count(), strategy.num_replicas_in_sync)
"""


@pytest.fixture
def place(monkeypatch, tmp_path):
    (tmp_path / "kubernetes.py").write_text("raise ImportError")  # JAX then looks further
    set_variables = variables_setter(monkeypatch, {
        "PLACE": "1", "PLACE_ADDRESS": f"127.0.0.1:{free_port()}", "PLACE_TIMEOUT": "60", "JAX_PLATFORMS": "cpu",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "XLA_FLAGS": ""})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return set_variables


@pytest.fixture(scope="module")
def detection():
    from jax._src.clusters import ClusterEnv

    before = list(ClusterEnv._cluster_types)
    exec(PLACE, {})
    yield
    ClusterEnv._cluster_types[:] = before


@pytest.mark.filterwarnings("ignore:.*Kubernetes environment detected")
@pytest.mark.usefixtures("detection")
def test_the_cluster_is_the_one_that_jax_finds(place, monkeypatch):
    place(PLACE_ADDRESS="pod-0.job:8482")
    assert detected_cluster("k8s", 1) == ClusterDescription(
        ("pod-0.job:8482", ""), 1, source="JAX's detection (k8s)")
    place(JAX_COORDINATOR_ADDRESS="10.0.0.1:99")
    assert detected_cluster("k8s", 1).coordinator_address == "10.0.0.1:99"
    monkeypatch.delenv("PLACE")
    assert detected_cluster("k8s", 1) is None


@pytest.mark.parametrize(("variables", "reason"), [
    ({"PLACE_ADDRESS": "pod-0.job"}, "'pod-0.job' has no port"), ({"PLACE": "first"}, "invalid literal"),
    ({"PLACE": "2"}, "have the numbers 0 to 1")])
@pytest.mark.filterwarnings("ignore:.*Kubernetes environment detected")
@pytest.mark.usefixtures("detection")
def test_a_place_that_is_not_found_is_an_error_that_says_what_to_do(place, variables, reason):
    place(**variables)
    with pytest.raises(ClusterError, match=rf"^There are signs of a cluster \(k8s\), .* set TF_CONFIG=.* {reason}"):
        detected_cluster("k8s", 1)


def test_a_version_of_jax_that_cannot_be_asked_is_told(monkeypatch):
    from jax._src.clusters import ClusterEnv

    monkeypatch.setattr(ClusterEnv, "auto_detect_unset_distributed_params", lambda address: None)
    with pytest.raises(ImportError, match="has changed: too many positional"):
        detected_cluster("k8s", 1)
    monkeypatch.undo()
    monkeypatch.delattr(ClusterEnv, "auto_detect_unset_distributed_params")
    with pytest.raises(ImportError, match="has changed"):
        detected_cluster("k8s", 1)


@pytest.mark.processes
def test_two_processes_train_as_one_program(place):
    place()
    assert outputs_of(SCRIPT, [{"PLACE": "0"}, {"PLACE": "1"}]) == ["0 2 2\n", "1 2 2\n"]


@pytest.mark.processes
@pytest.mark.parametrize("number", [0, 1])
def test_who_does_not_come_is_named(place, number):
    place(PLACE=str(number), PLACE_TIMEOUT="2")
    alone = subprocess.run([sys.executable, "-c", SCRIPT], text=True, capture_output=True, timeout=60, check=False)
    assert alone.returncode == 1
    assert "ClusterTimeout: " in alone.stderr and f"process {1 - number}" in alone.stderr


@pytest.mark.processes
def test_where_jax_finds_no_cluster_a_process_trains_alone(place, monkeypatch):
    place()
    monkeypatch.delenv("PLACE")
    assert outputs_of(SCRIPT, [{}]) == ["0 1 1\n"]
