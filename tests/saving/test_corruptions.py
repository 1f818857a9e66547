"""No damage to checkpoints gives a wrong number: a run ends with the right ones, or with a clear error.

A seeded part of `benchmarks/corruptions.py`, which does the same with many more.
"""

import random
import shutil

import pytest

from tests.support import corruptions, damaged_runs
from trainer.engine.saving.checkpoint import folder


@pytest.fixture(scope="module")
def training():
    return damaged_runs.Training()


@pytest.fixture(scope="module")
def saved(training, tmp_path_factory):
    """Two checkpoints that no test changes."""
    path = tmp_path_factory.mktemp("saved") / "backup"
    training.interrupt(path)
    assert {child.name for child in path.glob("step_*")} == {damaged_runs.NEWEST, damaged_runs.OLDER}
    return path


def judged(training, saved, kind, trouble=damaged_runs.NO_TROUBLE, seed=0):
    return damaged_runs.judged(training, saved, kind, trouble, random.Random(f"{kind} {trouble} {seed}"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", corruptions.KINDS)
def test_damage_gives_the_same_numbers_or_a_clear_error(training, saved, kind):
    verdict = judged(training, saved, kind)
    assert verdict.kind != damaged_runs.WRONG, verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a file cut short", "a bit flipped", "a folder emptied", "a checkpoint removed",
                                  "a part taken from the other checkpoint"])
@pytest.mark.parametrize("trouble", ["read-only folder", "long files fail"])
def test_damage_on_a_disk_that_cannot_be_written_is_a_clear_error(training, saved, kind, trouble):
    verdict = judged(training, saved, kind, trouble)
    assert verdict.kind == damaged_runs.REFUSED, verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", corruptions.KINDS)
def test_every_damage_changes_a_checkpoint(saved, tmp_path, kind):
    before = corruptions.contents_of(saved)
    for seed in range(5):
        path = tmp_path / str(seed)
        shutil.copytree(saved, path)
        corruptions.damage(kind, random.Random(seed), path / damaged_runs.NEWEST, path / damaged_runs.OLDER)
        assert corruptions.contents_of(path) != before


@pytest.mark.slow
def test_nothing_of_the_state_before_a_resume_gets_into_the_numbers(training, saved, tmp_path):
    figures, count = training.resume(tmp_path / "empty", save_freq="epoch")
    assert count == damaged_runs.BATCHES * damaged_runs.EPOCHS
    different = damaged_runs.differences(figures, training.expected)
    assert {"weight 0", "history loss", "learning rate", "state 0"} <= set(different)
    shutil.copytree(saved, tmp_path / "backup")
    figures, count = training.resume(tmp_path / "backup", save_freq="epoch")
    assert (damaged_runs.differences(figures, training.expected), count) == ([], 9)


@pytest.mark.slow
def test_the_verdict_is_wrong_where_damage_is_not_noticed(training, saved, monkeypatch):
    monkeypatch.setattr(folder, "check_manifest", lambda path: None)
    verdicts = [judged(training, saved, kind) for kind in ("a file replaced by a folder", "bytes appended")]
    assert {verdict.kind for verdict in verdicts} == {damaged_runs.WRONG}


@pytest.mark.slow
def test_a_state_of_another_checkpoint_would_give_other_numbers(training, saved, tmp_path, monkeypatch):
    path = shutil.copytree(saved, tmp_path / "backup")
    shutil.rmtree(path / damaged_runs.NEWEST / "state")
    shutil.copytree(path / damaged_runs.OLDER / "state", path / damaged_runs.NEWEST / "state")
    monkeypatch.setattr(folder, "check_manifest", lambda path: None)
    figures, _ = training.resume(path, save_freq="epoch")
    assert "weight 0" in damaged_runs.differences(figures, training.expected)
