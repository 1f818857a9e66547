"""Our models against those of `keras.applications` with the same weights, at standard and odd sizes."""

import numpy as np
import pytest

from tests.support import keras_twins
from tests.support.keras_twin_cases import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # in Keras
]


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


@pytest.mark.slow
@pytest.mark.parametrize("twin", [
    pytest.param(twin, marks=() if twin.name == "MobileNet" else pytest.mark.exhaustive) for twin in FAMILIES
], ids=lambda twin: twin.name)
def test_predictions_are_those_of_keras(keras, twin, tmp_path):
    theirs = twin.theirs(keras, twin.sizes[0])
    first = twin.images(twin.sizes[0])
    keras_twins.scaled_head(keras, keras_twins.settled(keras, theirs, first), first)
    path = tmp_path / "theirs.weights.h5"
    ours = keras_twins.twin(theirs, twin.ours(), twin.sizes[0], path)
    outputs = np.log(ours.predict(first, verbose=0))
    assert outputs.std(0).mean() > 0.2, "the weights must tell images apart"
    for size in twin.sizes:
        if size != twin.sizes[0]:
            theirs = twin.theirs(keras, size)
            theirs.load_weights(path)  # not `set_weights`, after which `Normalization` computes with what it had
        assert keras_twins.difference(theirs, ours, twin.images(size)) < 1e-4
