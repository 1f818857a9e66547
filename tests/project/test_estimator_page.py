"""docs/estimator.md is true: its blocks run one after another."""

import pytest

from tests.support import pages


@pytest.mark.slow
def test_the_page_runs_from_its_beginning_to_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = pages.run("docs/estimator.md")
    assert names["metrics"]["global_step"] == 40
    assert set(names["logs"]) == {"loss"}
    assert names["metrics_of_classifier"]["global_step"] == 20
    assert names["prediction"]["classes"][0] in (b"0", b"1")
