"""Behaviours of the Estimator that were recorded from TensorFlow 2.15, each by its name."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support import estimator_behaviours, estimator_settings

FILES = {"estimator.json": estimator_behaviours.BEHAVIOURS, "estimator_settings.json": estimator_settings.BEHAVIOURS}
RECORDED = {name: result for file in FILES for name, result in estimator_behaviours.recorded(file).items()}
OURS = {name: function for behaviours in FILES.values() for name, function in behaviours.items()}


def test_every_behaviour_that_was_recorded_is_compared():
    assert OURS.keys() == RECORDED.keys()


@pytest.mark.sampled
@pytest.mark.parametrize("name", RECORDED)
def test_behaviour_is_that_of_tensorflow(name):
    ours, theirs = OURS[name](), RECORDED[name]
    numbers, structure = jax.tree.flatten(ours, is_leaf=lambda leaf: leaf is None)
    expected, expected_structure = jax.tree.flatten(theirs, is_leaf=lambda leaf: leaf is None)
    assert structure == expected_structure
    for one, other in zip(numbers, expected, strict=True):
        if isinstance(other, float):
            np.testing.assert_allclose(one, other, rtol=1e-5)
        else:
            assert one == other
