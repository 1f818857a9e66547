"""What TF_CONFIG means, and each way in which it can be wrong."""

import dataclasses
import json
import socket

import pytest

from tests.support import project_files
from trainer.distribute.cluster.description import cluster_resolver
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError, split_address
from trainer.distribute.cluster.description.cluster_resolver import (
    TFConfigClusterResolver,
    detect_cluster,
    resolve_cluster,
)

HOSTS = ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]
WORKER_0 = {"type": "worker", "index": 0}
CLUSTER_VARIABLES = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                     "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS",
                     "SLURM_PROCID", "SLURM_LOCALID", "TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES",
                     "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY", "KUBERNETES_SERVICE_HOST")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def config(cluster, role="worker", index=0):
    return {"cluster": cluster, "task": {"type": role, "index": index}}


def message_for(tf_config):
    with pytest.raises(ClusterError, match=r"^TF_CONFIG ") as caught:
        TFConfigClusterResolver(tf_config)
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("The network was used.")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def outside_of_clusters(monkeypatch):
    for name in CLUSTER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster_resolver, "TPU_DEVICES", ())


@pytest.mark.parametrize(("role", "index", "process_id", "is_chief"),
                         [("chief", 0, 0, True), ("worker", 0, 1, False), ("worker", 1, 2, False)])
def test_the_chief_is_process_0_and_the_workers_follow(role, index, process_id, is_chief):
    resolver = TFConfigClusterResolver(config({"worker": HOSTS[:2], "chief": HOSTS[2:]}, role, index))
    assert (resolver.process_id, resolver.is_chief) == (process_id, is_chief)
    assert (resolver.task_type, resolver.task_id) == (role, index)
    assert resolver.num_workers == 3
    assert resolver.coordinator_address == HOSTS[2]
    assert resolver.cluster_spec() == {"worker": HOSTS[:2], "chief": HOSTS[2:]}
    assert resolver.description().addresses == (HOSTS[2], HOSTS[0], HOSTS[1])
    assert resolver.description().member(1) == f"worker 0 ({HOSTS[0]})"


def test_without_a_chief_worker_0_is_one():
    assert TFConfigClusterResolver(config({"worker": HOSTS})).is_chief
    assert not TFConfigClusterResolver(config({"worker": HOSTS}, index=1)).is_chief


@pytest.mark.parametrize(("cluster", "role"), [({"worker": HOSTS}, "evaluator"),
                                               ({"worker": HOSTS[:2], "ps": HOSTS[2:]}, "ps")])
def test_evaluators_and_parameter_servers_do_not_train(cluster, role):
    resolver = TFConfigClusterResolver(config(cluster, role))
    assert resolver.process_id is None and not resolver.is_chief
    assert resolver.num_workers == len(cluster["worker"])
    assert resolver.description().role == role


def test_changing_the_returned_spec_changes_nothing():
    resolver = TFConfigClusterResolver(config({"worker": HOSTS}))
    resolver.cluster_spec()["worker"].clear()
    assert resolver.num_workers == 3


@pytest.mark.parametrize(("extra", "environment"), [({}, ""), ({"environment": "cloud"}, "cloud"),
                                                    ({"environment": 3, "rpc_layer": "grpc", "job": {}}, "")])
def test_keys_of_other_tools_are_no_error(extra, environment):
    assert TFConfigClusterResolver({**config({"worker": HOSTS}), **extra}).environment == environment


def test_the_environment_variable_is_read_when_nothing_is_given(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config({"worker": HOSTS}, index=2)))
    assert TFConfigClusterResolver().process_id == 2
    assert resolve_cluster() == ClusterDescription(tuple(HOSTS), 2, "worker", ("worker 0", "worker 1", "worker 2"))


def test_without_the_environment_variable_there_is_no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert resolve_cluster() is None
    with pytest.raises(ClusterError, match=r"^TF_CONFIG is not set"):
        TFConfigClusterResolver()


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_environment_variable_is_not_taken_for_a_missing_one(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ClusterError, match=r"TF_CONFIG is set but empty.* Unset it"):
        resolve_cluster()


@pytest.mark.parametrize(("tf_config", "words"), [
    ("{not json", ["is not JSON", "character 1", "double quotes"]),
    ("[" * 100_000, ["is not JSON"]),
    ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', ["'worker' twice"]),
    ("[1]", ["must be a JSON object", "a list"]),
    ("null", ["must be a JSON object", "null"]),
    ({}, ["no 'cluster'", "nothing"]),
    ({"task": WORKER_0}, ["no 'cluster'", "only: 'task'"]),
    ({"cluster": {"worker": HOSTS}}, ["no 'task'"]),
    ({"cluster": {"worker": HOSTS}, "task": "worker"}, ["a string as 'task'"]),
    ({"cluster": {"worker": HOSTS}, "task": {"index": 0}}, ["no 'task.type'", "chief, worker, ps, evaluator"]),
    ({"cluster": {"worker": HOSTS}, "task": {"type": "worker"}}, ["no 'task.index'"]),
    ({"cluster": HOSTS, "task": WORKER_0}, ["a list as 'cluster'", "Expected an object"]),
    (config({"worker": HOSTS}, index="1"), ["a string as task.index", "'1'", "without quotes"]),
    (config({"worker": HOSTS}, index=1.0), ["a number as task.index", "1.0"]),
    (config({"worker": HOSTS}, index=True), ["true or false as task.index"]),
    (config({"worker": HOSTS}, index=3), ["task.index 3", "from 0 to 2", "is 3"]),
    (config({"worker": HOSTS}, index=-1), ["task.index -1", "from 0 to 2"]),
    (config({"worker": HOSTS}, "evaluator", 1), ["task.index 1", "must be 0"]),
    (config({"worker": HOSTS}, "boss"), ["'boss'", "Known names: chief, evaluator, ps, worker"]),
    (config({"worker": HOSTS}, "wroker"), ["'wroker'", "Did you mean 'worker'?"]),
    (config({"worker": HOSTS}, "master"), ["'master'", "'chief'"]),
    (config({"worker": HOSTS}, ["worker"]), ["a list as task.type"]),
    (config({"worker": HOSTS}, "chief"), ["'chief'", "lists only: worker"]),
    (config({"workers": HOSTS}), ["'workers'", "Did you mean 'worker'?"]),
    (config({"worker": HOSTS[:2], "evaluator": HOSTS[2:]}), ["'evaluator' in 'cluster'", "not part", "Remove"]),
    (config({"worker": []}), ["empty list", "'worker'"]),
    (config({}), ["without 'chief' and 'worker'"]),
    (config({"ps": HOSTS}, "ps"), ["without 'chief' and 'worker'"]),
    (config({"worker": HOSTS[0]}), ["a string as the cluster's 'worker'", "Expected a list"]),
    (config({"worker": {"0": HOSTS[0]}}), ["an object as the cluster's 'worker'"]),
    (config({"worker": [2222]}), ["a number as the address of worker 0"]),
    (config({"chief": HOSTS[:2]}, "chief"), ["2 chiefs", "at most one"]),
    (config({"worker": [HOSTS[0], "10.0.0.2"]}), ["worker 1", "'10.0.0.2'", "no port", "host:port"]),
    (config({"worker": [HOSTS[0], HOSTS[0]]}), [HOSTS[0], "worker 0 and worker 1"]),
    (config({"worker": HOSTS[:1], "ps": HOSTS[:1]}), [HOSTS[0], "worker 0 and ps 0"]),
    (config({"worker": ["Host:2222", "host:2222"]}), ["'host:2222'", "both"]),
    (config({"worker": ["localhost:2222", "127.0.0.1:2222"]}), ["'127.0.0.1:2222'", "both"]),
    (config({"worker": ["[fd00::1]:1", "[fd00:0::1]:1"]}), ["'[fd00:0::1]:1'", "both"]),
    (config({"worker": [HOSTS[0], "localhost:2222"]}), ["mixes", "worker 1 (localhost:2222)", "worker 0 (10.0.0.1"]),
    (config({"worker": ["127.0.1.1:2222"], "ps": HOSTS[:1]}), ["mixes", "127.0.1.1:2222"]),
    (config({"worker": ["[::1]:2222", HOSTS[0]]}), ["mixes", "[::1]:2222"]),
    (config({"worker": ["[::ffff:127.0.0.1]:2222", HOSTS[0]]}), ["mixes", "[::ffff:127.0.0.1]:2222"]),
    (config({"worker": ["a.localhost.:2222", HOSTS[0]]}), ["mixes", "a.localhost.:2222"]),
    (config({"worker": ["[::ffff:10.0.0.1]:2222", "10.0.0.1:2222"]}), ["'10.0.0.1:2222'", "both"]),
    ('{"cluster": ' + "1" * 5000 + "}", ["too many digits"]),
])
def test_a_wrong_tf_config_is_refused_with_the_reason(tf_config, words):
    message = message_for(tf_config)
    assert [word for word in words if word not in message] == [], message
    if not isinstance(tf_config, str):
        assert message_for(json.dumps(tf_config)) == message


def test_a_long_wrong_value_is_shortened_in_the_message():
    assert len(message_for(config({"worker": HOSTS}, index="7" * 10_000))) < 300
    assert len(message_for(config({"worker": HOSTS}, "x" * 10_000))) < 300


@pytest.mark.parametrize(("address", "expected"), [
    ("10.0.0.1:1", ("10.0.0.1", 1)), ("worker-0.jobs:65535", ("worker-0.jobs", 65535)), ("[::1]:80", ("::1", 80)),
    ("my_app_1:80", ("my_app_1", 80)), ("[fd00::1]:2222", ("fd00::1", 2222)), ("host.:80", ("host.", 80))])
def test_an_address_is_host_and_port(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize(("address", "reason"), [
    ("host", "no port"), ("[::1]", "no port"), ("", "no port"), ("host:0", "1 to 65535"), ("host:65536", "1 to 65535"),
    ("host:", "1 to 65535"), ("host:+80", "1 to 65535"), ("host:8_0", "1 to 65535"), ("host: 80", "1 to 65535"),
    ("host:\u0661", "1 to 65535"), ("host:" + "9" * 5000, "1 to 65535"), (":80", "no valid host"),
    ("::1:80", "in brackets"), ("a b:80", "no valid host"), ("-x:80", "no valid host"),
    ("256.0.0.1:80", "no valid host"), ("[host]:80", "no IPv6 address"), ("[10.0.0.1]:80", "no IPv6 address"),
    ("grpc://host:80", "scheme"), ("0.0.0.0:80", "all interfaces"), ("[::]:80", "all interfaces"),
    ("[::ffff:0.0.0.0]:80", "all interfaces"), ("224.0.0.1:80", "many hosts"), ("255.255.255.255:80", "many hosts"),
    ("a..b:80", "no valid host"), ("a.-b:80", "no valid host"), ("a" * 64 + ":80", "no valid host"),
    (".".join(["a" * 60] * 5) + ":80", "no valid host")])
def test_an_address_that_cannot_be_reached_is_refused(address, reason):
    with pytest.raises(ClusterError, match=reason):
        split_address(address)


@pytest.mark.parametrize(("fields", "reason"), [
    ({"addresses": ()}, "at least one process"), ({"process_id": 3}, "0 to 2"), ({"process_id": -1}, "0 to 2"),
    ({"addresses": ("host",)}, "no port"), ({"names": ("chief",)}, "1 names for 3 addresses")])
def test_a_description_that_does_not_fit_together_is_refused(fields, reason):
    with pytest.raises(ClusterError, match=reason):
        dataclasses.replace(ClusterDescription(tuple(HOSTS), 0), **fields)


@pytest.mark.parametrize(("names", "expected"), [
    ((), None), (("OMPI_MCA_orte_hnp_uri",), "ompi"), (SLURM, "slurm"), (SLURM[:-1], None),
    ((*SLURM, "OMPI_MCA_orte_hnp_uri"), "ompi"), (CLUSTER_VARIABLES[1:4], "ompi"), (("TPU_WORKER_HOSTNAMES",), None)])
@pytest.mark.usefixtures("outside_of_clusters")
def test_a_cluster_is_detected_by_its_environment_variables(monkeypatch, names, expected):
    for name in names:
        monkeypatch.setenv(name, "1")
    assert detect_cluster() == expected


@pytest.mark.parametrize(("names", "package", "expected"), [
    (("TPU_WORKER_HOSTNAMES",), "libtpu", "gketpu"), ((), "libtpu", "gcetpu"), ((), "another", None),
    (("TPU_SKIP_MDS_QUERY",), "libtpu", None),
    (("KUBERNETES_SERVICE_HOST",), "kubernetes", "k8s"), (("KUBERNETES_SERVICE_HOST",), "another", None)])
@pytest.mark.usefixtures("outside_of_clusters")
def test_tpus_and_kubernetes_need_a_package_too(monkeypatch, tmp_path, names, package, expected):
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(cluster_resolver, "_has_package", lambda name: name == package)
    monkeypatch.setattr(cluster_resolver, "TPU_DEVICES", (str(tmp_path),))
    assert detect_cluster() == expected


@pytest.mark.parametrize("names", [(), ("OMPI_MCA_orte_hnp_uri",), SLURM, SLURM[:-1]])
@pytest.mark.usefixtures("outside_of_clusters")
def test_jax_detects_the_same(monkeypatch, names):
    from jax._src import clusters  # no public way to ask; a difference should show here first
    for name in names:
        monkeypatch.setenv(name, "1")
    found = [cluster.name for cluster in (clusters.OmpiCluster, clusters.SlurmCluster) if cluster.is_env_present()]
    assert found == ([detect_cluster()] if names and names != SLURM[:-1] else [])


def test_what_comes_before_jax_imports_none_of_it():
    cluster = project_files.ROOT / "trainer" / "distribute" / "cluster"
    folders = [cluster / name for name in ("description", "rendezvous")]
    sources = {path.name: path.read_text() for folder in folders for path in folder.glob("*.py")}
    del sources["detected_cluster.py"]  # what JAX finds, only JAX can tell
    assert [name for name, source in sources.items() if "import jax" in source or "from jax" in source] == []
