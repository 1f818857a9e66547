"""docs/logging.md and docs/reports.md are true: their code runs, and their tables are those of the code."""

import contextlib
import inspect
import json
import logging
import re
import sys
from unittest import mock

import numpy as np
import pytest

from tests.support import pages, project_files
from trainer.callbacks import History, RunRecord, loggers

LOGGING, REPORTS = "docs/logging.md", "docs/reports.md"


@contextlib.contextmanager
def unconfigured_logging():
    """Takes back what a page configures."""
    root, level = logging.getLogger(), logging.getLogger("trainer").level
    before, root.handlers = root.handlers, []  # pytest's, with which `basicConfig` would do nothing
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
        logging.getLogger("trainer").setLevel(level)
        logging.captureWarnings(False)


@pytest.mark.slow
def test_the_code_on_logging_does_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with unconfigured_logging():
        names = pages.run(LOGGING)
        logging.getLogger("trainer.callbacks").info("hello")
    assert "worst epoch: 0" in capsys.readouterr().out
    first, *rows = [json.loads(line) for line in (tmp_path / "runs/first/log.jsonl").read_text().splitlines()]
    assert first["params"]["width"] == 16 and first["params"]["learning_rate"] == 0.01
    assert [row["step"] for row in rows if "batch_loss" in row] == [4, 8, 12, 16]
    assert [row["epoch"] for row in rows if "val_loss" in row] == [0, 1, 2]
    assert names["history"].epoch == [0, 1]
    assert "trainer.callbacks INFO hello" in (tmp_path / "training.log").read_text()


@pytest.mark.parametrize(("package", "name", "calls"), [
    ("comet_ml", "Comet", ["log_parameters", "log_metrics", "log_asset", "end"]),
    ("aim", "Aim", ["set_artifacts_uri", "__setitem__", "track", "log_artifact", "close"])])
def test_the_recipes_for_trackers_are_loggers(package, name, calls, monkeypatch):
    block, = re.findall(rf"^```py\n(import {package}\n.*?)^```", (project_files.ROOT / LOGGING).read_text(),
                        re.MULTILINE | re.DOTALL)
    run = mock.MagicMock()
    monkeypatch.setitem(sys.modules, package, mock.Mock(start=lambda **_: run, Run=lambda **_: run))
    names = {}
    exec(block, names)
    logger = names[name]()
    assert isinstance(logger, loggers.Logger)
    logger.log_params({"width": 16})
    logger.log_metrics({"loss": 0.5}, step=0)
    logger.log_artifact("notes.txt")
    logger.finish()
    assert [call[0] for call in run.mock_calls] == calls


@pytest.mark.slow
def test_the_code_on_reports_does_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = pages.run(REPORTS)
    printed = capsys.readouterr().out
    assert printed.startswith("History of 8 epochs\nepoch") and printed.endswith("runs/blobs/report.html\n")
    assert (tmp_path / "curves.png").exists()
    page = (tmp_path / "runs/blobs/report.html").read_text()
    right = int((names["model"].predict(names["x"][-120:], verbose=0).argmax(-1) == names["labels"][-120:]).sum())
    assert f"{right} of 120 rows are right" in page
    record = json.loads((tmp_path / "runs/blobs/run.json").read_text())
    keys = {key.strip("` ") for cells in pages.rows_of_tables(REPORTS) for key in cells[0].split(",")}
    assert keys - record.keys() == {"config"} and record.keys() - keys <= {"format", "model"}  # a script has no config
    np.testing.assert_allclose(record["history"]["loss"], names["history"].history["loss"])


def test_the_table_of_loggers_has_them_all_with_their_extras():
    rows = [cells for cells in pages.rows_of_tables(LOGGING) if cells[0].startswith("`loggers.")]
    listed = [cells[0].removeprefix("`loggers.").partition("(")[0] for cells in rows]
    assert sorted(listed) == sorted({name for name in dir(loggers) if inspect.isclass(getattr(loggers, name))} - {
        "LogTo", "Logger", "ResumableLogger", "Tracker"})
    extras = (project_files.ROOT / "pyproject.toml").read_text()
    for cells in rows:
        if len(cells) > 2 and cells[2].strip("` |"):
            assert f"\n{cells[2].strip('` |').partition('[')[2].strip(']')} = [" in extras


@pytest.mark.parametrize("page", [LOGGING, REPORTS])
def test_links_lead_to_files_that_exist(page):
    files = [file for file in pages.linked_files(page) if "http" not in str(file)]
    assert all(file.exists() for file in files)


def test_what_the_pages_name_exists():
    assert callable(History.plot) and callable(History.epochs_of) and RunRecord.runs_on == "chief"
