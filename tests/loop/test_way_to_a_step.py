"""The way from `Model.fit` to a compiled step: short, and drawn in CONTRIBUTING as it is traced."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import project_files

MOST_CALLS, MOST_FILES, MOST_ON_STACK = 250, 20, 7
MOST_FILES_TO_READ = 20


@pytest.fixture(scope="module")
def traced():
    """Returns the numbers of calls, files and frames, and both pictures, of a process that has done nothing else."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.support.way_to_a_step"], cwd=project_files.ROOT, text=True, check=True,
        env={**environment, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE).stdout
    counts, _, pictures = output.partition("\n")
    return list(map(int, re.findall(r"\d+", counts))), pictures.rstrip("\n").split("\n\n")


@pytest.mark.slow
def test_the_way_is_short(traced):
    (calls, files, on_stack), (picture, _) = traced
    assert calls <= MOST_CALLS and files <= MOST_FILES and on_stack <= MOST_ON_STACK
    assert len({line.split()[-1] for line in picture.splitlines()}) <= MOST_FILES_TO_READ


@pytest.mark.slow
def test_the_way_is_drawn_for_contributors(traced):
    text = (project_files.ROOT / "CONTRIBUTING.md").read_text()
    for picture in traced[1]:
        assert f"```text\n{picture}\n```" in text, "python -m tests.support.way_to_a_step"
