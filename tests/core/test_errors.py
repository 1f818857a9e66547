"""Which names an error lists for one that is unknown: a few, the nearest first."""

import pytest

from trainer.core.errors import near_hint
from trainer.metrics import registry

METRICS = [*registry._BY_NAME, *registry._BY_SHAPES]


@pytest.mark.parametrize(("received", "meant"), [
    ("f1", "f1_score"), ("F1", "F1Score"), ("rmse", "root_mean_squared_error"), ("roc_auc", "auc"),
    ("cross_entropy", "crossentropy"), ("acuracy", "accuracy"), ("top_k", "top_k_categorical_accuracy"),
    ("mean_sq_error", "mean_squared_error"),
])
def test_names_of_other_libraries_and_misspelled_ones_are_recognized(received, meant):
    assert near_hint(received, METRICS).startswith(f"Did you mean '{meant}'")


@pytest.mark.parametrize("received", ["zzz", "accuracyy", "", "cross_entropy"])
def test_at_most_five_names_are_listed_each_in_one_spelling(received):
    hint = near_hint(received, METRICS)
    names = hint.split(": ")[-1].split(", ") if "nearest" in hint else hint.split(" or ")
    assert 1 <= len(names) <= 5
    letters = [name.strip("?.").split("'")[-2 if "'" in name else 0].replace("_", "").lower() for name in names]
    assert len({*letters}) == len(letters)


def test_all_of_a_few_names_are_listed():
    assert near_hint("file", ["data", "off", "auto"]) == "Known names: auto, data, off."
