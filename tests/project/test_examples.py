"""The demo trains well, says so, and draws its curves; so do the other examples, without curves."""

import ast
import os
import subprocess
import sys

import pytest

from tests.support import project_files


def printed_by(name, folder):
    """Returns the lines that an example prints; it runs in a folder, with the devices of this machine."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, str(project_files.ROOT / "examples" / name)], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_digits_demo_reaches_its_accuracy_and_writes_its_curves(tmp_path):
    lines = printed_by("digits.py", tmp_path)
    assert lines[0] == "Training on 8 replicas."
    assert ast.literal_eval(lines[-1])["accuracy"] > 0.97
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_small_gpt_learns_to_add(tmp_path):
    assert ast.literal_eval(printed_by("miniature_gpt.py", tmp_path)[-1])["share_of_right_sums"] > 0.8


@pytest.mark.slow
def test_reconstructions_are_nearer_to_the_images_than_their_mean_is(tmp_path):
    metrics = ast.literal_eval(printed_by("vae.py", tmp_path)[-1])
    assert metrics["mse"] < 0.6 * metrics["mse_of_mean_image"]


@pytest.mark.slow
def test_made_digits_have_the_mean_and_the_spread_of_real_ones(tmp_path):
    metrics = ast.literal_eval(printed_by("dcgan.py", tmp_path)[-1])
    assert metrics["difference_of_mean_images"] < 0.15
    assert 0.7 < metrics["spread_of_pixels"] / metrics["spread_of_real_pixels"] < 1.3
