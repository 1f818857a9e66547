"""The way from `Model.fit` to a compiled step: short, and drawn in CONTRIBUTING as it is traced."""

import pytest

from tests.support import project_files, way_to_a_step

MOST_CALLS, MOST_FILES = 330, 46


@pytest.fixture(scope="module")
def calls():
    return way_to_a_step.traced()


def test_the_way_is_short(calls):
    assert calls[0].function.startswith("entry_point") and calls[-1].is_on_stack
    assert len(calls) <= MOST_CALLS
    assert len({call.file for call in calls}) <= MOST_FILES


def test_few_functions_are_on_the_stack_when_a_step_runs(calls):
    assert sum(call.is_on_stack for call in calls) <= 7


def test_the_way_is_drawn_for_contributors(calls):
    text = (project_files.ROOT / "CONTRIBUTING.md").read_text()
    assert f"```text\n{way_to_a_step.drawn(calls)}\n```" in text, "python -m tests.support.way_to_a_step"
