"""docs/resume.md is true: its examples run, and the harness that it shows finds its training exact."""

import re
import sys

import pytest

from tests.support import project_files

PAGE = (project_files.ROOT / "docs" / "resume.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
HARNESS = re.search(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "resume.md", "exec"), {"__name__": "__main__"})
    assert not (tmp_path / "backup").exists(), "a finished training deletes its checkpoints"


@pytest.mark.slow
def test_the_training_that_the_harness_kills_is_exact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BLOCKS[-1])
    assert BLOCKS[-1].startswith("# train.py")
    kills = "[1, 3, Kill(save=1, delay_secs=0.01), Kill(validation=2)]"
    assert kills in HARNESS
    # Two kills will do here.
    exec(HARNESS.replace(kills, "[3, Kill(validation=2)]"), {"__name__": "__main__", "sys": sys})
