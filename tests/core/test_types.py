"""Objects of Keras as arguments: those that compute without state are taken, others are refused by name."""

import numpy as np
import pytest
from flax import linen as nn

import trainer

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")


class OwnMean(keras.metrics.Mean):
    pass


class OwnMetric(keras.metrics.Metric):
    pass


class OwnAdam(keras.optimizers.Adam):
    pass


def compiled(optimizer="sgd", loss="mse", **arguments):
    model = trainer.Model(nn.Dense(3), seed=0)
    model.compile(optimizer, loss, **arguments)
    return model


@pytest.mark.parametrize(("arguments", "words"), [
    (lambda: {"metrics": [keras.metrics.CategoricalAccuracy()]}, "Use `trainer.metrics.CategoricalAccuracy`"),
    (lambda: {"metrics": [keras.metrics.CategoricalAccuracy]}, "the class CategoricalAccuracy.* Use `trainer.metrics"),
    (lambda: {"weighted_metrics": [keras.metrics.AUC()]}, "Use `trainer.metrics.AUC`"),
    (lambda: {"metrics": [OwnMean()]}, "Derive OwnMean from `trainer.metrics.Mean`"),
    (lambda: {"metrics": [OwnMetric()]}, "Derive OwnMetric from `trainer.metrics.Metric`"),
    (lambda: {"loss": keras.metrics.MeanSquaredError()}, "Use `trainer.losses.MeanSquaredError`"),
    (lambda: {"loss": keras.metrics.Mean()}, "Use a class of `trainer.losses`"),
    (lambda: {"loss": keras.losses.Huber}, "the class Huber. It is Keras's. Use `trainer.losses.Huber`"),
    (lambda: {"optimizer": keras.optimizers.Adam()}, "type Adam. It is Keras's. Use `trainer.optimizers.Adam`"),
    (lambda: {"optimizer": {"Dense_0": keras.optimizers.SGD()}}, "Use `trainer.optimizers.SGD`"),
    (lambda: {"optimizer": OwnAdam()}, "Derive OwnAdam from `trainer.optimizers.Adam`"),
    (lambda: {"regularizers": {"**/kernel": keras.regularizers.L2}}, "Use `trainer.regularizers.L2`"),
])
def test_compile_refuses_what_keeps_state_and_names_the_replacement(arguments, words):
    with pytest.raises(TypeError, match=words):
        compiled(**arguments())


def test_losses_functions_schedules_and_penalties_of_keras_compute_as_ours():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(10, 4)).astype("float32"), random.normal(size=(10, 3)).astype("float32")

    def history(library, schedules):
        model = compiled(trainer.optimizers.SGD(schedules.ExponentialDecay(0.1, 2, 0.5)), library.losses.Huber(),
                         metrics=[library.metrics.mean_squared_error],
                         regularizers={"**/kernel": library.regularizers.L2(0.1)})
        return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    theirs = history(keras, keras.optimizers.schedules)
    ours = history(trainer, trainer.optimizers.schedules)
    assert theirs.keys() == ours.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("layer", "words"), [
    (lambda: keras.Input((4,)), "an input of Keras. Leave it out"),
    (lambda: keras.layers.InputLayer((4,)), "an input of Keras. Leave it out"),
    (lambda: keras.layers.Dense(3), "a layer of Keras, Dense. Use a layer of Flax"),
    (lambda: keras.layers.Flatten(), "a layer of Keras, Flatten"),
])
def test_layers_of_keras_are_refused_by_name(layer, words):
    with pytest.raises(TypeError, match=rf"Layer 1 must be .* Received: {words}"):
        trainer.Sequential([nn.Dense(3), layer()])
