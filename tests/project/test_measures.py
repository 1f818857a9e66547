"""The limits of measures of the code, and the measures on small sources."""

import ast
import functools

import pytest

from tests.project import measures

pytestmark = [pytest.mark.slow, pytest.mark.every_case]  # `make lint` has them too


@functools.cache
def measures_of(folders):
    return measures.measured(measures.sources(folders=folders))


@pytest.fixture
def measured():
    return measures_of(measures.FOLDERS)


def test_few_files_use_private_names_of_others(measured):
    assert len(measured.reaches) <= 15, sorted(measured.reaches)


def test_few_parameters_are_typed_any(measured):
    assert measured.bare[True] <= 0.08 * measured.parameters[True]
    assert measured.bare.total() <= 0.12 * measured.parameters.total()


@pytest.mark.parametrize("folders", [measures.FOLDERS, measures.TEXT_FOLDERS], ids=",".join)
@pytest.mark.parametrize("kind", ["docstrings", "comments"])
def test_texts_are_plain(folders, kind):
    whats, ones = getattr(measures_of(folders), kind).per_thousand()
    assert whats <= 1 and ones <= 2, "python -m tests.project.measures"


@pytest.mark.parametrize(("source", "names"), [
    ("from trainer.core.errors import _name", {"_name"}), ("model._core", {"_core"}), ("self._core", set()),
    ("class A:\n    def set(self): self._x = 1\ndef of(a): return a._x", set()), ("import os\nos._exit(0)", {"_exit"}),
])
def test_private_names_of_other_files_are_found(source, names):
    assert measures.private_names(ast.parse(source)) == names


@pytest.mark.parametrize(("text", "whats", "ones"), [
    ("Returns what it has.", 1, 0), ("Returns the one that is there, or ones.", 0, 2),
    ("One row, or one of `what`.", 0, 1), (">>> what", 0, 0), ("The first one", 0, 1)])
def test_words_are_counted(text, whats, ones):
    found = measures.measured({"trainer/core/a.py": f'"""{text}"""\n', "trainer/core/b.py": f"x = 1  # {text}\n"})
    for words in (found.docstrings, found.comments):
        assert (words.whats, words.ones) == (whats, ones)


def test_a_comment_may_have_several_lines():
    source = 'x = "# no"  # one\n# row, and\n\n# a second one\n# line\n'
    assert list(measures.comments(source)) == [" one", " row, and", " a second one\n line"]
    assert measures.measured({"trainer/a.py": source}).comments == measures.Words(count=7, ones=1)


def test_parameters_and_lines_are_counted():
    source = ('def f(a: Any, b: int): return a\ndef _g(a: Any):\n    """Text.\n\n    More.\n    """\n    # why\n'
              "    return a\n")
    found = measures.measured({"trainer/core/a.py": source, "callbacks/b.py": "x = 1\n"})
    assert (found.parameters, found.bare) == ({True: 2, False: 1}, {True: 1, False: 1})
    assert found.lines == {"trainer/core": 8, "callbacks": 1}
    assert found.code_lines == {"trainer/core": 3, "callbacks": 1}
