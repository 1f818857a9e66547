"""The fixtures that every test runs under do fail where they should."""

import pathlib
import subprocess
import sys

import pytest

CONFTEST = pathlib.Path(__file__).parents[1] / "conftest.py"
LEAKS = {
    "thread": ("threading.Thread(target=time.sleep, args=(3,), name='forgotten').start()",
               "threads left running: ['forgotten']"),
    "prefetcher": ("threading.Thread(target=time.sleep, args=(3,), name='trainer-x', daemon=True).start()",
                   "threads left running: ['trainer-x']"),
    "added_variable": ("os.environ['ADDED'] = '1'", "environment variables left changed: ['ADDED']"),
    "removed_variable": ("del os.environ['HOME']", "environment variables left changed: ['HOME']"),
}
TIDY = """
def test_tidy(monkeypatch):
    monkeypatch.setenv("ADDED", "1")
    threading.Thread(target=time.sleep, args=(0.01,)).start()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What pytest prints about one test per leak, and one that cleans up."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    tests = [f"def test_{name}():\n    {body}\n" for name, (body, _) in LEAKS.items()]
    (folder / "test_sample.py").write_text("\n".join(["import os, threading, time", *tests, TIDY]))
    command = [sys.executable, "-m", "pytest", "-vrE", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    done = subprocess.run(command, cwd=folder, env={"HOME": "/", "COLUMNS": "200"}, capture_output=True,
                          text=True, timeout=120, check=False)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_fails_the_test_that_left_it(report, name):
    assert f"ERROR test_sample.py::test_{name} - AssertionError: {LEAKS[name][1]}" in report


@pytest.mark.slow
def test_a_test_that_cleans_up_passes(report):
    assert f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in report


def test_every_test_sees_eight_devices(devices):
    assert len(devices) == 8
