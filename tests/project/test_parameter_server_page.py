"""docs/parameter_server.md is true: its blocks run, and its file for Kubernetes fits what it says."""

import pytest
import yaml

from tests.support import pages, project_files
from trainer.distribute.parameter_server.processes.failures import EXIT_CODE

PAGE = "docs/parameter_server.md"


@pytest.mark.processes
def test_the_page_runs_from_its_beginning_to_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = pages.run(PAGE)
    assert names["accuracy"] > 0.85 and len(names["history"].history["loss"]) == 3
    assert len(names["losses_of_table"]) == 10
    assert names["steps_done"] == 300 + 100 + 20 and names["mean"] < 1


def test_links_lead_to_files():
    assert [path for path in pages.linked_files(PAGE) if not path.exists()] == []


def test_the_cluster_on_kubernetes_has_a_token_and_resumes_after_a_lost_server():
    cluster, job = yaml.safe_load_all((project_files.ROOT / "docs" / "clusters" / "kuberay.yaml").read_text())
    nodes = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [*(node["template"]["spec"] for node in nodes), job["spec"]["template"]["spec"]]
    for pod in pods:
        container, = pod["containers"]
        variables = {variable["name"]: variable for variable in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in variables["RAY_AUTH_TOKEN"]["valueFrom"]
    assert cluster["spec"]["workerGroupSpecs"][0]["replicas"] >= 4 + 2, "each process on a node of its own"
    rule, = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [EXIT_CODE]
    assert rule["onExitCodes"]["containerName"] == pods[-1]["containers"][0]["name"]
