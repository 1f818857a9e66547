"""docs/configuration.md is true: its files train, and its commands print what it says."""

import json
import re
import shlex
import sys

import pytest
import sklearn  # noqa: F401  it sets environment variables

from tests.support import pages
from trainer.tools.command_line.commands import main

PAGE = "docs/configuration.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the page."""
    pytest.importorskip("jsonargparse")
    for name, language in (("digits.py", "py"), ("run.yaml", "yaml")):
        text, = (block for block in pages.blocks(PAGE, language) if block.startswith(f"# {name}\n"))
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    return tmp_path


def commands(name):
    """Returns the arguments of a command of the page, by the subcommand and another word of it."""
    lines = "".join(pages.blocks(PAGE, "sh")).splitlines()
    found, = (line for line in lines if re.match(rf"python -m trainer {name}", line))
    return shlex.split(found)[3:]


def shown(beginning):
    text, = (block for block in pages.blocks(PAGE, "text") if block.startswith(beginning))
    return text


@pytest.mark.slow
def test_the_commands_print_what_the_page_says(folder, capsys):
    assert main(commands(r"fit .*--trainer.epochs 2")) == 0
    numbers = r"(\w+): (\d\.\d{4})"
    printed = dict(re.findall(numbers, capsys.readouterr().out.splitlines()[1]))
    expected = dict(re.findall(numbers, shown("Epoch").splitlines()[1]))
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=0.02)
    for command in (r"fit .*widht", r"fit .*width 128"):
        with pytest.raises(SystemExit):
            main(commands(command))
        error = capsys.readouterr().err.partition("error: ")[2]
        assert f"error: {error}" in "".join(pages.blocks(PAGE, "text"))
    assert main(commands(r"fit .*--trainer.epochs 3")) == 0
    capsys.readouterr()
    losses, outputs, exported = shown('{"loss"').splitlines()
    for command, line in ((r"evaluate", losses), (r"predict", outputs), (r"export", exported)):
        assert main(commands(command)) == 0
        printed = capsys.readouterr().out.splitlines()[-1]
        if command == "evaluate":
            assert json.loads(printed) == pytest.approx(json.loads(line), abs=0.02)
        else:
            assert printed == line
    files = {path.name for path in (folder / "runs" / "a").iterdir()}
    assert files >= {"config.yaml", "run.json", "step_45", "model", "model_stablehlo"}


@pytest.mark.slow
def test_the_study_of_optuna_prints_what_the_page_says(folder, capsys):
    pytest.importorskip("optuna")
    pages.run(PAGE)
    printed, expected = ([tuple(map(float, line.split())) for line in text.splitlines()[-3:]]
                         for text in (capsys.readouterr().out, shown("64 0.0064")))
    for ours, theirs in zip(printed, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=0.03)


@pytest.mark.slow
def test_the_callback_of_the_page_prunes_the_trial_of_its_module(folder, capsys, monkeypatch):
    optuna = pytest.importorskip("optuna")
    monkeypatch.delitem(sys.modules, "pruning", raising=False)
    text, = (block for block in pages.blocks(PAGE, "py") if block.startswith("# pruning.py\n"))
    (folder / "pruning.py").write_text(text)
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=2.0))  # above every accuracy

    def objective(trial):
        import pruning

        pruning.current = trial
        main(["fit", "--config", "run.yaml", "--run", "runs/pruned", "--trainer.verbose", "0",
              "--trainer.callbacks+=pruning.Pruning"])

    study.optimize(objective, n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]
    record = json.loads((folder / "runs/pruned/run.json").read_text())
    assert record["status"] == "failed" and study.trials[0].intermediate_values.keys() == {0}


@pytest.mark.slow
def test_the_printed_configuration_trains(folder, capsys):
    arguments = commands(r"fit .*--print_config")
    with pytest.raises(SystemExit):
        main(arguments[: arguments.index(">")])
    (folder / "run.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "--config", "run.yaml", "--compile.loss", "SparseCategoricalCrossentropy",
                 "--compile.loss.from_logits", "true", "--trainer.verbose", "0"]) == 0


def test_links_lead_to_files():
    assert [path for path in pages.linked_files(PAGE) if not path.exists()] == []


def test_sections_are_those_of_the_parser():
    pytest.importorskip("jsonargparse")
    from trainer.tools.command_line.configuration import parser_of

    keys = {action.dest.partition(".")[0] for action in parser_of("fit", "")._actions}
    rows = [row[0].strip("`") for row in pages.rows_of_tables(PAGE)]
    assert keys - {"config", "help", "print_config"} <= set(rows)
