"""docs/command_line.md, docs/tuning.md and docs/export.md are true: their code runs, their links and names exist."""

import re

import pytest
import sklearn  # noqa: F401  it sets environment variables

from tests.support import pages, project_files
from trainer.engine.saving.formats import FORMATS
from trainer.tools.command_line.commands import main

PAGES = ("docs/command_line.md", "docs/tuning.md", "docs/export.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run(page)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    assert [path for path in pages.linked_files(page) if not path.exists()] == []


def test_the_commands_are_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert set(re.findall(r"^python -m trainer (\w+)", pages.read(PAGES[0]), re.MULTILINE)) == listed


def test_every_format_has_a_row():
    assert [row[0].split(" ")[0].strip('`"') for row in pages.rows_of_tables(PAGES[2])] == list(FORMATS)


def test_the_callbacks_are_those_of_the_examples():
    optuna, ray = (block.split("def on_epoch_end")[1].splitlines()[1:] for block in pages.blocks(PAGES[1], "py"))
    for lines, example in ((optuna, "optuna_pruning.py"), (ray, "ray_tune.py")):
        text = (project_files.ROOT / "examples" / example).read_text()
        assert lines and all(line.strip() in text for line in lines)
