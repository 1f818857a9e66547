"""The helpers of `trainer.utils` beside Keras's of the same name."""

import pytest

from tests.support import keras_comparison as compare
from tests.support.keras_cases import UTILS
from trainer import utils

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")


@pytest.mark.parametrize("name", sorted(UTILS))
def test_results_are_those_of_keras(name):
    for arguments, options in UTILS[name]:
        ours, theirs = (compare.outcome(getattr(library, name), *arguments, **options)
                        for library in (utils, keras.utils))
        compare.check_equal("utils", ours, theirs, f"{name}{arguments}, {options}")
        assert not isinstance(ours, Exception)


def test_every_helper_of_arrays_is_compared():
    arrays = {name for name in utils.__all__
              if getattr(getattr(utils, name), "__module__", None) == "trainer.utils.arrays"}
    assert arrays & set(dir(keras.utils)) == set(UTILS)
