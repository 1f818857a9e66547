"""One seed for Python, NumPy and the models that are made afterwards."""

import random
import re
import sys
import types

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import utils

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    keras_utils = pytest.importorskip("keras").utils

pytestmark = pytest.mark.usefixtures("seeds_stay")


def weights(seed=None, kind=trainer.Model):
    model = kind(nn.Dense(3) if kind is trainer.Model else [nn.Dense(3), nn.Dropout(0.5)], seed=seed)
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)) * np.arange(8)[:, None], np.ones((8, 3)), batch_size=2, verbose=0)
    return np.asarray(jax.tree.leaves(model.state.params)[1])


def drawn():
    return random.random(), random.randint(0, 99), np.random.permutation(9).tolist()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 113, 2**32 - 1])
def test_python_and_numpy_draw_what_they_do_after_keras(seed):
    keras_utils.set_random_seed(seed)
    expected = drawn()
    utils.set_random_seed(seed)
    assert drawn() == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [trainer.Model, trainer.Sequential])
def test_models_without_a_seed_take_it_and_others_keep_theirs(kind):
    utils.set_random_seed(7)
    np.testing.assert_array_equal(weights(kind=kind), weights(7, kind))
    np.testing.assert_array_equal(weights(kind=kind), weights(kind=kind))
    assert not np.array_equal(weights(kind=kind), weights(0, kind))


@pytest.mark.slow
def test_a_model_that_is_there_keeps_its_seed():
    model = trainer.Model(nn.Dense(1))
    utils.set_random_seed(5)
    other = trainer.Model(nn.Dense(1))
    for built in (model, other):
        built.build(np.ones((2, 3)))
    assert (int(model.state.seed), int(other.state.seed)) == (0, 5)


@pytest.mark.parametrize(("name", "function"), [("torch", "manual_seed"), ("tensorflow", "random.set_seed")])
def test_libraries_that_are_imported_are_seeded(name, function, monkeypatch):
    seeds = []
    *outer, last = function.split(".")
    library = types.SimpleNamespace(**{last: seeds.append})
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**{outer[0]: library}) if outer else library)
    utils.set_random_seed(3)
    assert seeds == [3]


@pytest.mark.parametrize(("seed", "error"), [(1.5, TypeError), ("1", TypeError), (-1, ValueError), (2**32, ValueError)])
def test_a_seed_of_another_kind_is_refused(seed, error):
    with pytest.raises(error, match=re.escape("`seed` must be a whole number from 0 to 2**32 - 1")):
        utils.set_random_seed(seed)
