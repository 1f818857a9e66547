"""The fixtures that every test runs under do fail where they should."""

import pathlib
import subprocess
import sys

import pytest

CONFTEST = (pathlib.Path(__file__).parents[1] / "conftest.py").read_text()
LEAKS = {
    "thread": ("threading.Thread(target=over.wait, name='forgotten').start()",
               "threads left running: ['forgotten']"),
    "prefetcher": ("threading.Thread(target=over.wait, name='trainer-x', daemon=True).start()",
                   "threads left running: ['trainer-x']"),
    "added_variable": ("os.environ['ADDED'] = '1'", "environment variables left changed: ['ADDED']"),
    "removed_variable": ("del os.environ['HOME']", "environment variables left changed: ['HOME']"),
}
BEGINS = """
import os, threading, time
over = threading.Event()
def teardown_module():
    over.set()
"""
TIDY = """
def test_tidy(monkeypatch):
    monkeypatch.setenv("ADDED", "1")
    threading.Thread(target=time.sleep, args=(0.01,)).start()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What pytest prints about one test per leak, and one that cleans up."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "conftest.py").write_text(f"{CONFTEST}\nTHREAD_GRACE_SECS = 0.5\n")
    tests = [f"def test_{name}():\n    {body}\n" for name, (body, _) in LEAKS.items()]
    (folder / "test_sample.py").write_text("\n".join([BEGINS, *tests, TIDY]))
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


@pytest.mark.slow
def test_each_test_is_in_one_part_with_all_its_cases(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    parametrized = "@pytest.mark.parametrize('case', [0, 1])\ndef test_{}(case):\n    pass\n"
    (tmp_path / "test_sample.py").write_text("\n".join(["import pytest", *map(parametrized.format, "abcdef")]))
    found = []
    for part in (["--part=0/2"], ["--part=1/2"], []):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *part,
                               "--rootdir", str(tmp_path), str(tmp_path)], cwd=tmp_path, capture_output=True,
                              text=True, timeout=120, check=True)
        found.append({line for line in done.stdout.splitlines() if "::" in line})
    first, second, both = found
    assert first and second and not first & second and first | second == both
    assert all(name.replace("[0]", "[1]") in part for part in (first, second) for name in part)


def test_every_test_sees_eight_devices(devices):
    assert len(devices) == 8
