"""The published job on a small folder: one worker and two train on the same rows, and files that are no images wait."""

import ast
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.support import project_files

pytestmark = [pytest.mark.slow, pytest.mark.processes]
EXAMPLE = str(project_files.ROOT / "examples" / "cats_and_dogs.py")
# Adam moves each weight by its rate, however small a gradient is, so that rounding grows with it.
OPTIONS = ["--image-size", "32", "--alpha", "0.35"]
ONE, EACH = (["--batch-size", "16", "--learning-rate", "2e-5"], ["--batch-per-replica", "8", "--learning-rate", "1e-5"])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, colour in (("cats", (200, 80, 60)), ("dogs", (60, 90, 200))):
        (folder / name).mkdir()
        for number in range(20):
            pixels = rng.normal(colour, 50, (40, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")
    (folder / "cats" / "666.jpg").write_bytes(b"")
    (folder / "dogs" / "11702.jpg").write_bytes(b"<html>not found</html>")
    return folder


def run(command, folder):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles in half the time
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.exhaustive  # two minutes
def test_two_workers_train_as_one(photos, tmp_path):
    one, errors = run([EXAMPLE, str(photos), *OPTIONS, *ONE], tmp_path)
    assert one[:2] == ["Found 40 files belonging to 2 classes.", "Using 32 and 8 files for training and validation."]
    assert "2 of 42 files are left out. 2 are not images that can be read" in errors
    two, _ = run(["-m", "trainer.launch", "--workers", "2", EXAMPLE, str(photos), *OPTIONS, *EACH], tmp_path)
    alone, together = (ast.literal_eval(lines[-1].removeprefix("[worker 0] ")) for lines in (one, two))
    assert (alone["replicas"], together["replicas"]) == (1, 2)
    assert alone["batch_size"] == together["batch_size"] == 16
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-3)
