"""Files that were damaged or made to do harm end in a short error that names them, within seconds and little memory.

`tests/support/hostile_files.py` has the cases, for every reader, and what counts as wrong.
"""

import collections
import gc
import json
import subprocess
import sys

import pytest

from tests.support import hostile_files
from tests.support.hostile_contents import CRAFTED

CASES = hostile_files.cases()
PARTS = 2
STRIDE = 12  # of the cases, the quick part reads one of so many


def wrong_outcomes(numbers):
    """Returns what is wrong with some cases, by their names, after each was read in one process."""
    process = subprocess.run([sys.executable, "-m", "tests.support.hostile_files"], input=" ".join(map(str, numbers)),
                             capture_output=True, text=True, timeout=600)
    outcomes = dict(map(json.loads, process.stdout.splitlines()))
    assert process.returncode == 0 and len(outcomes) == len(numbers), (outcomes, process.stderr[-2000:])
    return {name: outcome for name, outcome in outcomes.items() if outcome}


def test_files_that_were_made_to_do_harm_are_refused():
    contents = hostile_files.Contents()
    found = {str(case): hostile_files.outcome_of(case, contents) for case in CASES[::STRIDE]}
    gc.collect()  # of iterators that ended by an error, whose threads end with them
    assert len(CASES) >= 200
    assert {name: outcome for name, outcome in found.items() if outcome} == {}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_hostile_files_are_refused(part):
    assert wrong_outcomes(range(part, len(CASES), PARTS)) == {}


def test_every_reader_has_cases_and_each_case_has_a_name_of_its_own():
    assert len(set(map(str, CASES))) == len(CASES)
    counts = collections.Counter(case.reader for case in CASES)
    assert counts.keys() == hostile_files.hostile_readers.READERS.keys()
    assert min(counts.values()) >= 10


def refusing(text):
    def read(path):
        raise ValueError(f"{path} {text}")
    return read


@pytest.mark.parametrize(("read", "outcome"), [
    (lambda path: None, "it was read"),
    (lambda path: print("\x1b[31m") or int("x"), "the message does not name the file: ValueError: "),
    (lambda path: {}["a"], "KeyError: "),
    (refusing("a" * 3000), "characters: ValueError"),
    (refusing("\x1b[31m"), "control characters: ValueError"),
    (lambda path: (path.parent.parent / "canary").mkdir(), "its code was run"),
    (lambda path: (path.parent.parent / "other").touch(), "written outside"),
])
def test_the_outcome_is_wrong_where_a_reader_is(tmp_path, monkeypatch, read, outcome):
    monkeypatch.setitem(hostile_files.hostile_readers.READERS, "words", read)
    case = hostile_files.Case("words", "a", CRAFTED["words", "JSON: a list"][0])
    assert outcome in hostile_files.judged(case, hostile_files.Contents(), tmp_path)
