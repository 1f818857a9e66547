"""A failed check says if it was made for another version of XLA."""

import importlib.metadata

import pytest

from tests.support.gpu_programs import SEEN_ON


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except AssertionError as error:
        version = f"jaxlib {importlib.metadata.version('jaxlib')}"
        if version not in SEEN_ON:
            error.add_note(f"{version} is new here: look at the program, and then at the check.")
        raise
