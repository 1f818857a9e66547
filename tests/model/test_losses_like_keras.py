"""Losses and metrics of several outputs, class weights and the lists of results: the same as Keras's."""

import numpy as np
import pytest
from flax import linen as nn

import trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # in Keras
]

RNG = np.random.default_rng(0)
ROWS = 22
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
Y = {"a": RNG.normal(size=(ROWS, 1)).astype(np.float32), "b": (RNG.random((ROWS, 1)) > 0.5).astype(np.float32)}
LABELS = RNG.integers(0, 3, ROWS)
WEIGHTS = RNG.random(ROWS).astype(np.float32)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


class Outputs(nn.Module):
    form: str

    @nn.compact
    def __call__(self, x):
        a, b = nn.Dense(1, name="a")(x), nn.sigmoid(nn.Dense(1, name="b")(x))
        return {"a": a, "b": b} if self.form == "dict" else [a, b]


def in_form(form, a, b):
    return {"a": a, "b": b} if form == "dict" else [a, b]


def both_with_outputs(keras, form):
    """Returns Keras's model and ours, with the same weights."""
    inputs = keras.Input((4,))
    dense, sigmoid = keras.layers.Dense(1, name="a"), keras.layers.Dense(1, activation="sigmoid", name="b")
    theirs = keras.Model(inputs, in_form(form, dense(inputs), sigmoid(inputs)))
    ours = trainer.Model(Outputs(form))
    ours.build(X)
    for layer in (dense, sigmoid):
        kernel, bias = layer.get_weights()
        ours.get_layer(layer.name).set_weights([bias, kernel])
    return theirs, ours


CASES = {
    "all": lambda form: {"loss": in_form(form, "mse", "binary_crossentropy"),
                         "metrics": in_form(form, ["mse", "mae"], ["accuracy"])},
    "weights": lambda form: {"loss": in_form(form, "mse", "binary_crossentropy"),
                             "loss_weights": in_form(form, 0.3, 2.0),
                             "weighted_metrics": in_form(form, ["mae"], ["accuracy"])},
    "none": lambda form: {"loss": in_form(form, None, "binary_crossentropy"),
                          "metrics": in_form(form, None, ["accuracy"])},
    "metric without loss": lambda form: {"loss": in_form(form, None, "binary_crossentropy"),
                                         "metrics": in_form(form, ["mae"], ["accuracy"])},
    "one for all": lambda form: {"loss": "mse"},
}


@pytest.mark.parametrize("form", ["dict", "list"])
@pytest.mark.parametrize("case", CASES)
def test_losses_of_some_outputs_and_their_weights(keras, form, case):
    arguments, results, logs = CASES[case](form), [], []
    y = in_form(form, Y["a"], Y["b"])
    for model in both_with_outputs(keras, form):
        weights = in_form(form, WEIGHTS, WEIGHTS)
        model.compile(optimizer="sgd", **arguments)
        results.append([
            *np.ravel(model.evaluate(X, y, batch_size=5, verbose=0, return_dict=False)),
            *np.ravel(model.train_on_batch(X, y, sample_weight=weights)),
            *np.ravel(model.test_on_batch(X, y, sample_weight=weights))])
        logs.append(model.fit(X, y, batch_size=5, epochs=2, shuffle=False, sample_weight=weights, verbose=0).history)
    np.testing.assert_allclose(results[1], results[0], rtol=2e-5)
    theirs, ours = logs
    # Outputs in a list have the names of layers in Keras; here they have none but their numbers.
    ours = {name.replace("output_1", "a").replace("output_2", "b"): values for name, values in ours.items()}
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=2e-5, err_msg=name)


def one_hot(labels):
    return np.eye(3, dtype=np.float32)[labels]


TARGETS = {
    "labels": (3, "sparse_categorical_crossentropy", LABELS),
    "a column": (3, "sparse_categorical_crossentropy", LABELS[:, None]),
    "one-hot": (3, "categorical_crossentropy", one_hot(LABELS)),
    "smoothed": (3, "categorical_crossentropy", 0.9 * one_hot(LABELS) + np.float32(0.1 / 3)),
    "binary": (1, "binary_crossentropy", (LABELS > 1).astype(np.float32)),
    "smoothed binary": (1, "binary_crossentropy", np.where(LABELS > 1, 0.9, 0.1)[:, None].astype(np.float32)),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # in Keras, with JAX 0.12
@pytest.mark.filterwarnings("ignore:`class_weight` has weights of 2:UserWarning")  # which binary labels have not
@pytest.mark.parametrize("weights", [{0: 0.0, 1: 2.0, 2: 0.5}, {1: 3.0}])
@pytest.mark.parametrize("case", TARGETS)
def test_class_weights(keras, case, weights):
    units, loss, y = TARGETS[case]
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(
        units, activation="sigmoid" if units == 1 else "softmax")])
    ours = trainer.Sequential([nn.Dense(units), nn.sigmoid if units == 1 else nn.softmax])
    ours.build(X)
    kernel, bias = theirs.get_weights()
    ours.set_weights([bias, kernel])
    histories = []
    for model in (theirs, ours):
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
        history = model.fit(X, y, batch_size=5, epochs=2, shuffle=False, class_weight=weights, validation_data=(X, y),
                            verbose=0).history
        history["batch"] = np.ravel(model.train_on_batch(X, y, class_weight=weights))
        histories.append(history)
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[1].items():
        np.testing.assert_allclose(values, histories[0][name], rtol=2e-5, err_msg=name)


def test_class_weights_are_for_one_output(keras):
    theirs, ours = both_with_outputs(keras, "dict")
    for model in (theirs, ours):
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="class_weight"):
            model.fit(X, Y, class_weight={0: 1.0}, verbose=0)


def test_further_logs_of_a_step_come_last_and_sorted(keras):
    """Keras's list has the metrics in their order, whatever that of the step's logs is, and then all else."""
    class Theirs(keras.Sequential):
        def test_step(self, state, data):
            logs, state = super().test_step(state, data)
            return {"z": 1.0, "b": 2.0, **dict(reversed(list(logs.items())))}, state

    class Ours(trainer.Sequential):
        def test_step(self, state, batch):
            logs = super().test_step(state, batch)
            return {"z": 1.0, "b": 2.0, **dict(reversed(list(logs.items())))}

    results = []
    theirs = Theirs([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    ours = Ours([nn.Dense(1, use_bias=False)])
    ours.build(X)
    ours.set_weights(theirs.get_weights())
    for model in (theirs, ours):
        model.compile("sgd", "mse", metrics=["mae", "mape"])
        results.append(model.evaluate(X, Y["a"], verbose=0, return_dict=False))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
