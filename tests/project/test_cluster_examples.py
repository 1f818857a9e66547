"""The files of docs/clusters fit together, and fit what the trainer does: names, ports, counts, exit codes."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml
from jax._src.clusters.slurm_cluster import SlurmCluster

from tests.support import project_files
from tests.support.waiting import GUARD_SECS
from trainer.distribute.cluster.description.cluster_description import split_address
from trainer.distribute.cluster.description.cluster_resolver import TFConfigClusterResolver, resolve_cluster
from trainer.distribute.cluster.liveness import process_end
from trainer.launch.supervisor import PEER_LOST, PREEMPTED, REFUSED

FOLDER = project_files.ROOT / "docs" / "clusters"
SLURM = FOLDER / "slurm.sh"
INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
RESTART_FIELD = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
PAGE_PORT = 2222
SECS_TO_SAVE = 60


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((FOLDER / "jobset.yaml").read_text())


@pytest.fixture(scope="module")
def job(jobset):
    replicated, = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1, "A second job's pods would have the same indices."
    return replicated["template"]["spec"]


@pytest.fixture(scope="module")
def pod(job):
    return job["template"]["spec"]


def environment_of(pod, index, restart=0):
    """Returns a container's variables as Kubernetes makes them: a reference to one that is not yet defined stays."""
    container, = pod["containers"]
    fields = {INDEX_FIELD: str(index), RESTART_FIELD: str(restart)}
    values: dict[str, str] = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            values[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            values[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), variable["value"])
    return values


def test_every_pod_of_the_jobset_gets_its_place_in_a_cluster_of_all(job, pod):
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    count = job["parallelism"]
    resolvers = [TFConfigClusterResolver(environment_of(pod, index)["TF_CONFIG"]) for index in range(count)]
    assert [resolver.process_id for resolver in resolvers] == list(range(count))
    assert {resolver.num_workers for resolver in resolvers} == {count}


def test_the_addresses_are_those_that_jobset_gives_the_pods(jobset, job, pod):
    network, name = jobset["spec"]["network"], jobset["metadata"]["name"]
    replicated, = jobset["spec"]["replicatedJobs"]
    assert network["enableDNSHostnames"] and network["publishNotReadyAddresses"]
    hosts = [f"{name}-{replicated['name']}-0-{index}.{network['subdomain']}" for index in range(job["parallelism"])]
    addresses = TFConfigClusterResolver(environment_of(pod, 0)["TF_CONFIG"]).cluster_spec()["worker"]
    assert [split_address(address)[0] for address in addresses] == hosts
    container, = pod["containers"]
    port, = container["ports"]
    assert {split_address(address)[1] for address in addresses} == {port["containerPort"]} == {PAGE_PORT}


def test_pods_of_different_starts_belong_to_different_jobs(pod):
    ids = [[environment_of(pod, index, restart)["TRAINER_JOB_ID"] for index in range(2)] for restart in range(2)]
    assert ids == [["train-0"] * 2, ["train-1"] * 2]


def test_the_jobset_starts_again_unless_the_configuration_was_refused(jobset, job, pod):
    policy = jobset["spec"]["failurePolicy"]
    (rule,), (pod_rule,) = policy["rules"], job["podFailurePolicy"]["rules"]
    assert policy["maxRestarts"] > 0
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert pod_rule["action"] == "FailJob"
    assert pod_rule["onExitCodes"] == {
        "containerName": pod["containers"][0]["name"], "operator": "In", "values": [REFUSED]}
    # A pod that Kubernetes starts again by itself would find the others in the middle of training.
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert process_end.REFUSED == REFUSED


def test_volumes_that_are_mounted_exist_and_there_is_time_to_save(pod):
    container, = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] == SECS_TO_SAVE


def test_both_examples_run_the_script_of_the_page(pod):
    page = (project_files.ROOT / "docs" / "multi_worker.md").read_text()
    assert "train.py" in page
    assert f":{PAGE_PORT}" in page
    assert pod["containers"][0]["command"] == ["python", "train.py"]
    assert re.search(r"^srun .*python train\.py ", SLURM.read_text(), re.MULTILINE)


def slurm_options():
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE))


def run_slurm(folder, code, restarts=None):
    """Runs the script with stand-ins for SLURM's commands; returns its exit code and what they were called with."""
    bodies = {"srun": f'echo "srun $JAX_COORDINATOR_PORT $*" >> calls\nexit {code}',
              "scontrol": 'echo "scontrol $*" >> calls'}
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "1234567"}
    environment.pop("SLURM_RESTART_COUNT", None)
    if restarts is not None:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(["bash", str(SLURM)], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=GUARD_SECS)
    assert done.stderr == ""
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_the_slurm_script_is_bash_and_its_options_come_before_any_command():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    first = next(number for number, line in enumerate(SLURM.read_text().splitlines()) if line and line[0] != "#")
    assert not any(line.startswith("#SBATCH") for line in SLURM.read_text().splitlines()[first:])


@pytest.mark.parametrize(("code", "restarts", "requeued"), [
    (0, None, False), (1, None, False), (REFUSED, None, False), (PEER_LOST, None, True), (PREEMPTED, 9, True),
    (PREEMPTED, 10, False),
])
def test_the_slurm_job_is_queued_again_when_it_lost_a_peer_or_was_preempted(tmp_path, code, restarts, requeued):
    exit_code, calls = run_slurm(tmp_path, code, restarts)
    assert exit_code == code
    assert calls == ["srun 24567 --kill-on-bad-exit=1 python train.py", *["scontrol requeue 1234567"] * requeued]


def test_slurm_tells_all_tasks_in_time_and_gives_each_a_gpu():
    options = slurm_options()
    assert options["signal"] == f"TERM@{SECS_TO_SAVE}", "with B: before it, only the script would get it"
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "#SBATCH --requeue\n" in SLURM.read_text()


def test_the_cluster_that_the_slurm_script_starts_is_found(monkeypatch):
    options = slurm_options()
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    for name in ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JOB_ID": 1234567, "STEP_NODELIST": "gpu[07-08]", "NTASKS": tasks, "PROCID": 5,
                        "LOCALID": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "24567")
    cluster = resolve_cluster()
    assert (cluster.coordinator_address, cluster.num_processes, cluster.process_id) == ("gpu07:24567", 8, 5)
    assert SlurmCluster.get_local_process_id() < int(options["gpus-per-node"])
