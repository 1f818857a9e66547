"""Every penalty beside Keras's, by name and as plain data; penalties of users."""

import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import keras_comparison as compare
from tests.support.keras_cases import REGULARIZERS
from tests.support.keras_inputs import INPUTS
from tests.support.networks import LinenMLP
from trainer import regularizers
from trainer.regularizers import L1L2, OrthogonalRegularizer, Regularizer

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")


class Distance(Regularizer):
    """A penalty as a user writes it, for Keras too."""

    def __init__(self, to):
        self.to = to

    def __call__(self, weights):
        return jnp.abs(weights - self.to).sum()

    def get_config(self):
        return {"to": self.to}


def test_all_of_kerass_penalties_are_there():
    kerass = {name for name, value in vars(keras.regularizers).items() if inspect.isclass(value)}
    assert kerass <= set(regularizers.__all__)
    assert {getattr(regularizers, name).__name__ for name in kerass} == {*REGULARIZERS, "Regularizer"}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(REGULARIZERS))
def test_penalties_are_kerass(name):
    weights = INPUTS["moderate"](compare.generator(name), 4)[0].astype("float32")
    for arguments in REGULARIZERS[name]:
        ours, theirs = getattr(regularizers, name)(**arguments), getattr(keras.regularizers, name)(**arguments)
        penalties = np.asarray(ours(weights)), np.asarray(theirs(jnp.asarray(weights)))
        compare.check_equal("regularizers", *penalties, f"{name}({arguments})")
        config, kerass = ours.get_config(), theirs.get_config()
        assert config == {key: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                          for key, value in kerass.items()}
        assert regularizers.get(keras.regularizers.serialize(theirs)).get_config().keys() == kerass.keys()
        assert regularizers.get(json.loads(json.dumps(regularizers.serialize(ours)))) == ours


@pytest.mark.parametrize("identifier", ["l1", "L2", "l1l2", "L1L2", "orthogonal_regularizer", None])
def test_identifiers_are_kerass(identifier):
    ours, theirs = regularizers.get(identifier), keras.regularizers.get(identifier)
    assert type(ours).__name__ == type(theirs).__name__
    assert regularizers.get(L1L2) == L1L2()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"factor": -1.0}, "`factor` must be a number of at least 0"), ({"mode": "row"}, "Did you mean 'rows'")])
def test_arguments_that_orthogonality_cannot_use(arguments, message):
    with pytest.raises(ValueError, match=message):
        OrthogonalRegularizer(**arguments)


def test_orthogonality_is_of_matrices_and_needs_two_vectors():
    with pytest.raises(ValueError, match=r"of matrices. Received: weights of shape \(3,\)"):
        OrthogonalRegularizer()(jnp.ones(3))
    assert float(OrthogonalRegularizer()(jnp.ones((1, 3)))) == 0.0


@pytest.mark.slow
def test_a_penalty_of_a_user_goes_round_and_trains():
    config = json.loads(json.dumps(regularizers.serialize(Distance(to=2.0))))
    assert regularizers.deserialize(config, {"Distance": Distance}) == Distance(to=2.0) != Distance(to=1.0)
    assert repr(Distance(to=2.0)) == "Distance(to=2.0)"
    x, y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)
    losses = []
    for given in (None, {"**/kernel": Distance(to=0.0)}, {"**/kernel": None}):
        model = trainer.Model(LinenMLP())
        model.compile("sgd", "mse", regularizers=given)
        model.build(x)
        absolute = sum(np.abs(kernel).sum() for kernel in model.get_weights() if kernel.ndim == 2)
        losses.append(model.evaluate(x, y, verbose=0)["loss"])
    assert losses[2] == losses[0]
    assert losses[1] - losses[0] == pytest.approx(absolute, rel=1e-5)


def test_a_penalty_without_call_says_so():
    with pytest.raises(NotImplementedError, match="Regularizer must define `__call__"):
        Regularizer()(jnp.ones(3))


def test_penalties_take_weights_of_a_model_and_lists():
    model = trainer.Model(nn.Dense(2))
    model.build(np.ones((1, 3), np.float32))
    kernel = model.weights[-1]
    for penalty in (regularizers.L1(0.5), regularizers.L2(0.5), regularizers.OrthogonalRegularizer(0.5)):
        assert float(penalty(kernel)) == float(penalty(kernel.value)) == float(penalty(kernel.numpy().tolist())) > 0
    assert float(jnp.square(kernel).sum()) == float(jnp.square(kernel.value).sum())
