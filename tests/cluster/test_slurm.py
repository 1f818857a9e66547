"""Clusters that SLURM describes, without SLURM: its variables are what `srun` would set."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support.launched_processes import outputs_of, variables_setter
from tests.support.rendezvous_cluster import free_port
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.cluster.description.cluster_resolver import resolve_cluster
from trainer.distribute.cluster.rendezvous.rendezvous import agree

STEP = {"JOB_ID": "1234567", "STEP_ID": "2", "STEP_NODELIST": "gpu[07-08],cpu1", "NTASKS": "3", "PROCID": "1",
        "LOCALID": "1"}
SCRIPT = """
import jax
import trainer
strategy = trainer.distribute.MultiWorkerMirroredStrategy(trainer.distribute.CommunicationOptions(timeout_seconds=60))
gpus = jax.config.values["jax_cuda_visible_devices"]
print(jax.process_index(), jax.process_count(), strategy.num_replicas_in_sync, gpus)
"""


@pytest.fixture
def slurm(monkeypatch):
    return variables_setter(monkeypatch, {f"SLURM_{name}": value for name, value in STEP.items()})


@pytest.mark.parametrize(("variables", "address"), [
    ({}, "gpu07:63111"), ({"JAX_COORDINATOR_PORT": "24567"}, "gpu07:24567"),
    ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "8"}, "gpu07:63111")])
def test_the_tasks_of_a_step_are_a_cluster(slurm, variables, address):
    slurm(**variables)
    assert resolve_cluster() == ClusterDescription(
        (address, "", ""), 1, names=("task 0", "task 1", "task 2"),
        source="environment (JAX_COORDINATOR_PORT, SLURM_STEP_NODELIST)", job_id="SLURM 1234567.2, restart 0",
        local_id=1)


def test_the_tasks_may_be_told_where_to_meet(slurm):
    slurm(JAX_COORDINATOR_ADDRESS="10.0.0.1:99", JAX_COORDINATOR_PORT="24567", SLURM_RESTART_COUNT="4")
    cluster = resolve_cluster()
    assert cluster.coordinator_address == "10.0.0.1:99"
    assert cluster.source == "environment (JAX_COORDINATOR_ADDRESS)"
    assert cluster.job_id == "SLURM 1234567.2, restart 4"


@pytest.mark.parametrize("nodes", ["gpu7", "gpu7,cpu1", "gpu[07-09,12],cpu1", "rack2-gpu[12,13]", "a,b[1-2]"])
@pytest.mark.parametrize("job", ["1", "1234567"])
def test_the_tasks_meet_where_jax_lets_them_meet(slurm, nodes, job):
    from jax._src.clusters import SlurmCluster  # no public way to ask; a difference should show here first

    slurm(SLURM_STEP_NODELIST=nodes, SLURM_JOB_ID=job)
    cluster = resolve_cluster()
    assert (cluster.coordinator_address, cluster.num_processes, cluster.process_id) == (
        SlurmCluster.get_coordinator_address(60, None), SlurmCluster.get_process_count(), SlurmCluster.get_process_id())


@pytest.mark.parametrize("variables", [
    {"SLURM_PROCID": None}, {"SLURM_STEP_NODELIST": None}])
def test_what_srun_did_not_start_is_no_task(slurm, variables):
    slurm(**variables)
    assert resolve_cluster() is None


def test_what_mpirun_started_is_no_task_either(slurm):
    uri = "4096.0;tcp://10.0.0.7:34911"
    slurm(OMPI_MCA_orte_hnp_uri=uri, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2",
          OMPI_COMM_WORLD_LOCAL_RANK="0")
    assert resolve_cluster().job_id == f"Open MPI {uri}"


def test_tf_config_counts_instead(slurm):
    slurm(TF_CONFIG='{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    assert resolve_cluster().addresses == ("a:1",)


@pytest.mark.parametrize(("variables", "match"), [
    ({"SLURM_NTASKS": "3(x2)"}, r"^SLURM_NTASKS is '3\(x2\)', which is no whole number. Start the tasks with `srun`"),
    ({"SLURM_JOB_ID": "-1"}, "^SLURM_JOB_ID is '-1', which is no whole number"),
    ({"SLURM_PROCID": "3"}, "^SLURM_PROCID is 3, but SLURM_NTASKS is 3"),
    ({"SLURM_NTASKS": "0"}, "^SLURM_PROCID is 1, but SLURM_NTASKS is 0"),
    ({"JAX_COORDINATOR_PORT": "high"}, "^Task 0 has a wrong address by JAX_COORDINATOR_PORT, SLURM_STEP_NODELIST: "
     "'gpu07:high' has the port 'high'"),
    ({"JAX_COORDINATOR_ADDRESS": "gpu07"}, "^Task 0 has .* by JAX_COORDINATOR_ADDRESS: 'gpu07' has no port"),
    ({"SLURM_STEP_NODELIST": ""}, "^Task 0 has .* SLURM_STEP_NODELIST: ':63111' has no valid host name")])
def test_variables_that_srun_does_not_set_so_are_refused(slurm, variables, match):
    slurm(**variables)
    with pytest.raises(ClusterError, match=match):
        resolve_cluster()


@pytest.mark.processes
def test_two_tasks_train_as_one_program_with_a_device_each(slurm):
    slurm(SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2", JAX_COORDINATOR_PORT=str(free_port()), JAX_PLATFORMS="cpu",
          XLA_FLAGS="")
    tasks = [{"SLURM_PROCID": index, "SLURM_LOCALID": index} for index in "01"]
    for index, output in enumerate(outputs_of(SCRIPT, tasks)):
        assert output.endswith(f"{index} 2 2 {index}\n"), "the GPU of its place, as JAX has it"


@pytest.mark.processes
def test_a_step_of_one_task_is_a_process_alone(slurm):
    slurm(SLURM_STEP_NODELIST="localhost", SLURM_STEP_NUM_TASKS="1", SLURM_NTASKS="8", SLURM_PROCID="0",
          JAX_PLATFORMS="cpu", XLA_FLAGS="")
    done = subprocess.run([sys.executable, "-c", SCRIPT], text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 1 1 all\n"), done.stderr


def test_a_port_in_use_names_the_variable_that_gives_another(slurm):
    with socket.create_server(("127.0.0.1", 0)) as other:
        slurm(SLURM_STEP_NODELIST="localhost", SLURM_PROCID="0", JAX_COORDINATOR_PORT=str(other.getsockname()[1]))
        with pytest.raises(ClusterError, match=r"another port in the environment \(JAX_COORDINATOR_PORT, "):
            agree(resolve_cluster(), timeout_secs=60)
