"""Event files hold what they were given, in a form that others read."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.event_files import read_events, read_png
from trainer.callbacks.tensorboard import event_file


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_holds_the_pixels(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, channels)).astype(np.uint8)
    np.testing.assert_array_equal(read_png(event_file.png(pixels)), pixels)


def test_a_histogram_leaves_out_what_is_not_finite():
    buckets = event_file.histogram_buckets(np.array([0.0, np.nan, 3.0, np.inf, 3.0]))
    assert (buckets[0, 0], buckets[-1, 1]) == (0.0, 3.0)
    assert (buckets[0, 2], buckets[-1, 2], buckets[:, 2].sum()) == (1, 2, 3)
    assert not event_file.histogram_buckets(np.array([np.nan])).any()


def test_two_files_of_one_moment_do_not_replace_each_other(tmp_path):
    files = [event_file.EventFile(str(tmp_path / "train")) for _ in range(2)]
    for index, file in enumerate(files):
        file.add_scalar("loss", index, step=index)
        file.close()
    assert [row[3:] for row in read_events(tmp_path)] == [(0, 0.0), (1, 1.0)]


def test_a_file_that_nobody_refers_to_is_closed(tmp_path):
    file = event_file.EventFile(str(tmp_path / "train"))
    file.add_scalar("loss", 0.5, step=0)
    del file
    assert [row[3:] for row in read_events(tmp_path)] == [(0, 0.5)]


def test_a_closed_file_can_be_closed_again(tmp_path):
    file = event_file.EventFile(str(tmp_path / "train"))
    file.close()
    file.close()
    assert read_events(tmp_path) == []


@pytest.mark.slow
def test_importing_changes_no_environment_variable():
    source = ("import os; before = dict(os.environ); import trainer.callbacks.tensorboard.event_file; "
              "print(os.environ == before)")
    environment = {name: value for name, value in os.environ.items() if name != "CRC32C_SW_MODE"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "True\n"
