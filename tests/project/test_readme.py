"""Every Python block of the README runs as it stands, and its table of strategies is true."""

import re

import numpy as np
import pytest

from tests.support import project_files
from trainer import distribute

README = (project_files.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
STRATEGIES = re.findall(r"^\| `(\w+Strategy)` \|.*\| (works|planned) \|$", README, re.MULTILINE)


def run(block: str) -> dict:
    names = {"__name__": "__main__"}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_quick_start_does_what_its_comments_say():
    names = run(BLOCKS[0])
    assert names["logits"].shape == (200, 3)
    logs = names["model"].evaluate(names["x"][800:], names["y"][800:], verbose=0)
    assert set(logs) == {"loss", "accuracy"}
    assert logs["accuracy"] > 0.8


@pytest.mark.slow
def test_an_optax_transformation_trains_a_model_of_the_package():
    names = run(BLOCKS[1])
    assert names["model"].predict(names["images"], verbose=0).shape == (8, 10)


def test_the_custom_step_is_the_one_that_trains():
    model = run(BLOCKS[2])["model"]
    before = model.get_weights()
    model.train_on_batch([[1.0, 1.0, 1.0]], [[1.0]])
    for old, new in zip(before, model.get_weights(), strict=True):
        assert abs(new - old) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
def test_the_loop_of_ones_own_trains():
    names = run(BLOCKS[3])
    assert names["loss"] < 0.5
    x, y = names["arrays"]
    assert names["model"].evaluate(x, y, verbose=0)["loss"] < names["loss"]


def test_the_split_model_is_split_and_its_report_printed(capsys):
    names = run(BLOCKS[4])
    assert not names["model"].state.params["layers_0"]["kernel"].sharding.is_fully_replicated
    assert names["report"].total_bytes < names["report"].unsharded_bytes / 4
    assert str(names["report"]) in capsys.readouterr().out


def test_the_big_step_is_one_update():
    assert run(BLOCKS[5])["model"].optimizer.iterations == 1


def test_the_run_that_may_be_interrupted_leaves_its_best_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = run(BLOCKS[6])["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors"], "the backup was deleted"
    assert len(model.load_weights("best.safetensors").matched) == 4


def test_the_files_hold_what_they_are_said_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(BLOCKS[7])
    assert names["report"].matched == ("layers_0/bias", "layers_0/kernel")
    np.testing.assert_allclose(names["predictions"], names["model"].predict(names["x"], verbose=0), rtol=1e-5)
    assert (tmp_path / "digits").is_dir()


def test_what_was_compiled_ahead_is_not_compiled_again(capsys):
    names = run(BLOCKS[8])
    assert names["secs"] > 0
    timing = names["history"].timing
    assert timing["compile"] < 0.2 * names["secs"]
    assert str(timing) in capsys.readouterr().out


def test_every_python_block_is_run():
    assert len(BLOCKS) == README.count("```python") == 9


def test_strategies_are_listed():
    assert len(STRATEGIES) == README.count("Strategy` |")


@pytest.mark.parametrize(("name", "state"), STRATEGIES)
def test_a_strategy_is_said_to_work_exactly_if_it_exists(name, state):
    assert hasattr(distribute, name) == (state == "works")
