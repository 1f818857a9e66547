"""The demo trains well, says so, and draws its curves."""

import ast
import os
import subprocess
import sys

import pytest

from tests.support import project_files


@pytest.mark.slow
def test_the_digits_demo_reaches_its_accuracy_and_writes_its_curves(tmp_path):
    script = project_files.ROOT / "examples" / "digits.py"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=300, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "Training on 8 replicas."
    assert ast.literal_eval(lines[-1])["accuracy"] > 0.97
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
