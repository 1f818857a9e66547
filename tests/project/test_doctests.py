"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib

import pytest
import sklearn  # noqa: F401  it sets environment variables, and a module with examples imports it

from tests.support import project_files

# Of rooms whose examples train models: `make test-rest` runs them.
SLOW = ("trainer.callbacks.", "trainer.distribute.", "trainer.engine.", "trainer.estimator.", "trainer.models.",
        "trainer.testing.", "trainer.tools.", "trainer.utils.model_plot", "trainer.utils.session")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.every_case] if name.startswith(SLOW) else [])
    for name in sorted(project_files.modules())])
def test_examples_in_docstrings_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=options).failed == 0


def test_a_wrong_example_is_noticed():
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "example", None, None)
    assert doctest.DocTestRunner(verbose=False).run(example, out=lambda text: None).failed == 1
