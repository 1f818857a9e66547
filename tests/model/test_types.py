"""The types of the public surface, as a type checker sees them in a user's script."""

import re
import subprocess
import sys

import pytest

from tests.support import project_files


@pytest.mark.slow
def test_scripts_of_users_type_check_and_their_mistakes_are_found(tmp_path):
    script = project_files.ROOT / "tests" / "support" / "typed_user_script.py"
    wrong = {number for number, line in enumerate(script.read_text().splitlines(), 1) if line.endswith("# wrong")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs", "--ignore-missing-imports",
         f"--cache-dir={tmp_path}", "--follow-imports=silent", str(script)],
        cwd=project_files.ROOT, capture_output=True, text=True, timeout=300, check=False)
    found = {int(number) for number in re.findall(r"typed_user_script\.py:(\d+): error", done.stdout)}
    assert found == wrong, done.stdout + done.stderr
