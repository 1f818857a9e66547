"""The fixtures that every test runs under do fail where they should."""

import pathlib
import subprocess
import sys

import pytest

CONFTEST = pathlib.Path(__file__).parent / "conftest.py"


def run_pytest_on(source: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_sample.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("body", "message"), [
    ("threading.Thread(target=time.sleep, args=(3,), name='forgotten').start()", "threads left running: ['forgotten']"),
    ("threading.Thread(target=time.sleep, args=(3,), name='trainer-x', daemon=True).start()", "['trainer-x']"),
    ("os.environ['ADDED'] = '1'", "environment variables left changed: ['ADDED']"),
    ("del os.environ['HOME']", "environment variables left changed: ['HOME']"),
])
def test_a_leak_fails_the_test_that_left_it(tmp_path, body, message):
    done = run_pytest_on(f"import os, threading, time\n\n\ndef test_leaks():\n    {body}\n", tmp_path)
    assert done.returncode == 1, done.stdout
    assert message in done.stdout


def test_a_test_that_cleans_up_passes(tmp_path):
    source = ("import os, threading, time\n\n\ndef test_tidy(monkeypatch):\n"
              "    monkeypatch.setenv('ADDED', '1')\n"
              "    threading.Thread(target=time.sleep, args=(0.01,)).start()\n")
    done = run_pytest_on(source, tmp_path)
    assert done.returncode == 0, done.stdout


def test_every_test_sees_eight_devices(devices):
    assert len(devices) == 8
