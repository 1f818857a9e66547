"""Calls of public names with a wrong argument are refused by errors of the trainer: none is silent, none is JAX's.

`tests/support/wrong_calls.py` makes the calls. `MEANINGS` lists values that look wrong and have a meaning.
"""

import collections

import pytest

from tests.support import wrong_calls

pytestmark = pytest.mark.usefixtures("seeds_stay")

STRIDE = 8  # of the calls, the quick part makes one of so many
MEANINGS = {
    ("axis", "-5"): "counts from the last axis",
    ("class_id", "-5"): "counts from the last class; an update refuses one that is not there",
    ("ignore_class", "-5"): "a label of no class",
    ("ema_overwrite_frequency", "-5"): "ignored without `use_ema`",
    ("mask_token", "-5"): "any token",
    ("seed", "-5"): "unused without `shuffle`, or a seed of Python's `random`",
    ("callbacks", "[]"): "none", ("loss", "[]"): "none", ("loss_weights", "[]"): "none", ("metrics", "[]"): "none",
    ("weighted_metrics", "[]"): "none", ("metrics", "None"): "none", ("weighted_metrics", "None"): "none",
    ("loss_weights", "3"): "of the one output",
    ("classifier_activation", "None"): "logits",
    ("validation_split", "None"): "0", ("validation_freq", "3"): "in each third epoch",
    ("decay_steps", "1.5"): "a period of 1.5 updates",
    ("first_decay_steps", "1.5"): "a period of 1.5 updates",
    ("dtype", "None"): "the default", ("num_oov_buckets", "None"): "0", ("axis", "[]"): "no axis",
    ("axis", "None"): "all axes", ("profile_batch", "3"): "the third batch", ("shape", "3"): "(3,)",
    ("default_value", "nan"): "NaN for rows that lack the feature", ("order", "None"): "2",
    ("freeze", "'typo_typo'"): "a pattern for a model that is not built, which is checked once it is",
    ("axis", "3"): "of arrays of more axes", ("name", "[]"): "layers of none", ("name", "None"): "no name",
}
TRACED = "a tracer"  # a number that JAX traces is one of an enclosing step, for losses, metrics and optimizers


@pytest.fixture(scope="module")
def calls():
    return list(wrong_calls.wrong_calls(wrong_calls.good_calls()))


def wrong_outcomes(calls):
    return {str(call): found for call in calls if (found := wrong_calls.outcome(call)) and not is_known(call)}


def is_known(call):
    text = str(call)
    value = text[text.index("=") + 1:-1]
    return value == TRACED or (call.parameter, value) in MEANINGS


def test_wrong_arguments_are_refused(calls):
    chosen = calls[::STRIDE]
    assert len(chosen) >= 300
    assert wrong_outcomes(chosen) == {}


@pytest.mark.slow
def test_all_wrong_arguments_are_refused(calls):
    assert wrong_outcomes(calls) == {}


@pytest.mark.slow
def test_what_has_a_meaning_still_has_it(calls):
    silent = collections.defaultdict(set)
    for call in filter(is_known, calls):
        if wrong_calls.outcome(call):
            silent[call.parameter].add(str(call).rpartition("=")[2][:-1])
    assert [known for known in MEANINGS if known[1] not in silent[known[0]]] == [], "take it from the list"


def test_calls_with_arguments_that_do_not_fit_each_other_are_refused():
    calls = wrong_calls.misfits()
    assert {name: found for name, call in calls.items() if (found := wrong_calls.outcome_of(call))} == {}


def refusing(value: int) -> None:
    raise TypeError("not of the trainer")


@pytest.mark.parametrize(("function", "outcome"), [(lambda value: None, "silent"), (refusing, "foreign: TypeError")])
def test_the_outcome_is_wrong_where_a_function_is(function, outcome):
    call = wrong_calls.WrongCall(wrong_calls.Good("f", function), "value", 3)
    assert wrong_calls.outcome(call).startswith(outcome)


def test_a_good_call_is_good():
    for good in wrong_calls.good_calls():
        if not good.name.startswith(("models.", "distribute.")):
            good.function(**good.arguments)
