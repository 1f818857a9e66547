"""Clusters that Open MPI describes: by the variables that `mpirun` would set, and with a real one where it is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support.launched_processes import outputs_of, variables_setter
from tests.support.rendezvous_cluster import free_port
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.cluster.description.cluster_resolver import resolve_cluster

URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911"
URI6 = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"
NAMESPACE = "prterun-node-7.rack-2-4097@1"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
OPEN_MPI_VARIABLES = (
    "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
SCRIPT = """
import jax
import trainer
strategy = trainer.distribute.MultiWorkerMirroredStrategy(trainer.distribute.CommunicationOptions(timeout_seconds=60))
gpus = jax.config.values["jax_cuda_visible_devices"]
print(jax.process_index(), jax.process_count(), strategy.num_replicas_in_sync, gpus)
"""


@pytest.fixture
def open_mpi(monkeypatch):
    return variables_setter(monkeypatch, {
        "OMPI_MCA_orte_hnp_uri": URI, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1"})


@pytest.fixture
def open_mpi_5(open_mpi):
    return lambda **changes: open_mpi(**{
        "OMPI_MCA_orte_hnp_uri": None, "OMPI_VERSION": "5.0.3", "PMIX_NAMESPACE": NAMESPACE, **changes})


def test_the_processes_of_a_launch_are_a_cluster(open_mpi):
    open_mpi()
    assert resolve_cluster() == ClusterDescription(
        ("10.96.0.1:62624", "", ""), 1, names=("rank 0", "rank 1", "rank 2"),
        source="environment (JAX_COORDINATOR_PORT, OMPI_MCA_orte_hnp_uri)", job_id=f"Open MPI {URI}", local_id=1)


def test_of_version_5_too(open_mpi_5):
    open_mpi_5()
    assert resolve_cluster() == ClusterDescription(
        ("node-7.rack-2:61442", "", ""), 1, names=("rank 0", "rank 1", "rank 2"),
        source="environment (JAX_COORDINATOR_PORT, PMIX_NAMESPACE)", job_id=f"Open MPI {NAMESPACE}", local_id=1)


@pytest.mark.parametrize("namespace", [NAMESPACE, "slurm.pmix.7.0"])
def test_ranks_on_one_machine_meet_there(open_mpi_5, namespace):
    open_mpi_5(PMIX_NAMESPACE=namespace, OMPI_COMM_WORLD_LOCAL_SIZE="3", OMPI_COMM_WORLD_RANK="0", PMIX_HOSTNAME="b")
    assert resolve_cluster().coordinator_address.startswith("127.0.0.1:")


def test_a_rank_alone_meets_nobody(open_mpi_5):
    open_mpi_5(PMIX_NAMESPACE=None, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="")
    cluster = resolve_cluster()
    assert (cluster.num_processes, cluster.process_id, cluster.local_id) == (1, 0, None)


@pytest.mark.parametrize(("variables", "match"), [
    ({"PMIX_NAMESPACE": "slurm.pmix.7.0"}, "^PMIX_NAMESPACE is 'slurm.pmix.7.0', which does not say on which machine "
     "`mpirun` was called. Set JAX_COORDINATOR_ADDRESS to rank 0's host"),
    ({"PMIX_NAMESPACE": None}, "^PMIX_NAMESPACE is ''"),
    ({"OMPI_COMM_WORLD_RANK": "0", "PMIX_HOSTNAME": "node-8"},
     "^Rank 0 runs on 'node-8', but `mpirun` was called on 'node-7.rack-2'. Set JAX_COORDINATOR_ADDRESS")])
def test_where_process_0_is_must_be_known(open_mpi_5, variables, match):
    open_mpi_5(**variables)
    with pytest.raises(ClusterError, match=match):
        resolve_cluster()
    open_mpi_5(**variables, JAX_COORDINATOR_ADDRESS="node-8:24567")
    assert resolve_cluster().coordinator_address == "node-8:24567"


@pytest.mark.parametrize(("variables", "address"), [
    ({"JAX_COORDINATOR_PORT": "24567"}, "10.96.0.1:24567"), ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99"}, "10.0.0.1:99"),
    ({"OMPI_MCA_orte_hnp_uri": URI6, "JAX_COORDINATOR_PORT": "7"}, "[fe80::b9b:ac5d:9cf0:b858]:7")])
def test_the_processes_may_be_told_where_to_meet(open_mpi, variables, address):
    open_mpi(**variables)
    assert resolve_cluster().coordinator_address == address


@pytest.mark.parametrize("job", ["1531576320", "4096", "8191", "99999999"])
def test_the_processes_meet_where_jax_lets_them_meet(open_mpi, job):
    from jax._src.clusters import OmpiCluster  # no public way to ask; a difference should show here first

    open_mpi(OMPI_MCA_orte_hnp_uri=f"{job}.0;tcp://10.0.0.7:34911")
    cluster = resolve_cluster()
    assert (cluster.coordinator_address, cluster.num_processes, cluster.process_id) == (
        OmpiCluster.get_coordinator_address(60, None), OmpiCluster.get_process_count(), OmpiCluster.get_process_id())


@pytest.mark.parametrize(("variables", "match"), [
    ({"OMPI_COMM_WORLD_RANK": "first"}, "^OMPI_COMM_WORLD_RANK is 'first', which is no whole number. Start the proc"),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": ""}, "^OMPI_COMM_WORLD_LOCAL_RANK is '', which is no whole number"),
    ({"OMPI_COMM_WORLD_SIZE": None}, "^OMPI_COMM_WORLD_SIZE is '', which is no whole number"),
    ({"OMPI_COMM_WORLD_RANK": "3"}, "^OMPI_COMM_WORLD_RANK is 3, but OMPI_COMM_WORLD_SIZE is 3. Start"),
    ({"OMPI_MCA_orte_hnp_uri": "1.0;usock"}, "^OMPI_MCA_orte_hnp_uri is '1.0;usock', which is no job's number"),
    ({"JAX_COORDINATOR_PORT": "high"}, "^Rank 0 has a wrong address by JAX_COORDINATOR_PORT, OMPI_MCA_orte_hnp_uri: "
     "'10.96.0.1:high' has the port 'high'")])
def test_variables_that_mpirun_does_not_set_so_are_refused(open_mpi, variables, match):
    open_mpi(**variables)
    with pytest.raises(ClusterError, match=match):
        resolve_cluster()


@pytest.mark.processes
@pytest.mark.skipif(MPIRUN is None, reason="needs Open MPI")
def test_two_processes_train_as_one_program(open_mpi):
    open_mpi(JAX_PLATFORMS="cpu", XLA_FLAGS="", JAX_LOCAL_DEVICE_IDS="", **dict.fromkeys(OPEN_MPI_VARIABLES))
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", SCRIPT]
    output = subprocess.run(command, text=True, capture_output=True, timeout=120, check=True).stdout
    assert sorted(output.splitlines()) == ["0 2 2 0", "1 2 2 1"]


@pytest.mark.processes
def test_variables_of_a_version_before_5_let_two_processes_train_as_one_program(open_mpi):
    open_mpi(OMPI_MCA_orte_hnp_uri="4096.0;tcp://127.0.0.1:34911", OMPI_COMM_WORLD_SIZE="2", JAX_PLATFORMS="cpu",
             JAX_COORDINATOR_PORT=str(free_port()), XLA_FLAGS="")
    ranks = [{"OMPI_COMM_WORLD_RANK": index, "OMPI_COMM_WORLD_LOCAL_RANK": index} for index in "01"]
    assert outputs_of(SCRIPT, ranks) == ["0 2 2 0\n", "1 2 2 1\n"]


@pytest.mark.processes
def test_tf_config_counts_instead(open_mpi_5):
    open_mpi_5(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0", JAX_PLATFORMS="cpu", XLA_FLAGS="")
    workers = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    outputs = outputs_of(SCRIPT, [{"TF_CONFIG": json.dumps(config)} for config in configs])
    assert outputs == ["0 2 2 all\n", "1 2 2 all\n"]
