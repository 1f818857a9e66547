"""Each listed difference from Keras exists, and docs/keras_differences.md lists all of them."""

import warnings

import pytest

import trainer
from tests.reference import make_keras_differences
from tests.support import keras_comparison as compare
from tests.support.keras_differences import DIFFERENCES

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # needs no further package
    keras = pytest.importorskip("keras")


# NumPy's, about Keras's variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def differ(ours, theirs):
    if isinstance(ours, Exception) and isinstance(theirs, Exception):
        return type(ours) is not type(theirs)
    return not compare.are_equal(ours, theirs)


@pytest.mark.sampled
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: f"{difference.room}-{difference.names}")
def test_a_listed_difference_is_one(difference):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's, where it lets a mistake pass
        ours, theirs = (compare.outcome(difference.example, library) for library in (trainer, keras))
    assert not isinstance(theirs, (AttributeError, NameError)) and not isinstance(ours, (AttributeError, NameError))
    assert differ(ours, theirs), f"{compare.shown(ours)}, as Keras: take it out of the table"


def test_the_page_lists_them():
    assert make_keras_differences.PAGE.read_text() == make_keras_differences.text(), (
        "run `python -m tests.reference.make_keras_differences`")
    assert {difference.room for difference in DIFFERENCES} == set(make_keras_differences.TITLES)


def test_equal_outcomes_and_errors_of_one_type_do_not_differ():
    assert not differ(compare.outcome(lambda: 1.0), compare.outcome(lambda: 1.0))
    assert not differ(ValueError("one"), ValueError("other"))
    assert differ(ValueError("one"), TypeError("one")) and differ(ValueError("one"), compare.outcome(lambda: 1.0))
