"""The README is short and true: its block runs, and its numbers are those of the benchmarks."""

import json
import re

import pytest

from tests.support import pages, project_files

README = pages.read("README.md")
BLOCKS = pages.blocks("README.md")


@pytest.mark.slow
def test_the_quick_start_does_what_its_comments_say():
    names = {"__name__": "__main__"}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (200, 3)
    logs = names["model"].evaluate(names["x"][800:], names["y"][800:], verbose=0)
    assert set(logs) == {"loss", "accuracy"}
    assert logs["accuracy"] > 0.8


def test_it_is_one_screen():
    assert len(README.splitlines()) <= 90


def test_every_python_block_is_run():
    assert len(BLOCKS) == README.count("```python") == 1


def test_the_facts_are_the_measured_ones():
    compared = json.loads(pages.read("benchmarks/results.json"))["mlp"]["comparisons"]
    medians = {entry["theirs"]: entry["median"] for entry in compared if entry["ours"] == "fit"}
    row = re.search(r"^\| A step of an MLP .*$", README, re.MULTILINE)[0]
    assert f"{medians['by hand']:.2f} times as long as in a jitted loop by hand" in row
    assert f"{medians['Keras on JAX']:.2f} times as long as in Keras on JAX" in row
    results = pages.read("benchmarks/RESULTS.md")
    assert "`FullyShardedStrategy` | 151.1 |" in results and "`MirroredStrategy` | 1209.1 |" in results
    assert "151 MB in place of 1209" in README
    assert "Of 36 kinds of training, 0 gave another result after a kill." in results


@pytest.mark.parametrize("command", re.findall(r"`python (benchmarks/\w+\.py)[^`]*`", README))
def test_the_commands_exist(command):
    assert (project_files.ROOT / command).is_file()
