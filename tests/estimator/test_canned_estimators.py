"""Canned estimators and heads: the numbers that TensorFlow 2.15's have on the same data (canned_estimators.json)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from tests.support.estimator_behaviours import X, Y, recorded
from trainer import estimator as est
from trainer.core.tree_paths import named_leaves, with_leaves
from trainer.estimator.canned import common, linear

RECORDED = recorded("canned_estimators.json")
AGE = np.array([[18.0], [30.0], [45.0], [60.0], [22.0]], np.float32)
CITY = np.array([["rome"], ["oslo"], ["rome"], ["lima"], ["oslo"]])
WEIGHT = np.array([[1.0], [2.0], [0.5], [1.0], [3.0]], np.float32)
BINARY = np.array([[0], [1], [1], [0], [1]])
CLASSES = np.array([[0], [1], [2], [0], [1]])


class Batches:
    """Batches of two rows, with text among the features."""

    def __init__(self, labels, weighted=False, repeat=False):
        self._features = {"age": AGE, "city": CITY, "x": X, **({"weight": WEIGHT} if weighted else {})}
        self._labels, self._repeat = labels, repeat

    @property
    def num_batches(self):
        return None if self._repeat else 3

    def __getitem__(self, index):
        rows = slice(2 * (index % 3), 2 * (index % 3) + 2)
        return {name: values[rows] for name, values in self._features.items()}, self._labels[rows]


def columns():
    return [est.numeric_column("x", shape=(2,)), est.bucketized_column(est.numeric_column("age"), [20.0, 40.0]),
            est.categorical_column_with_vocabulary_list("city", ["rome", "oslo"])]


def dense_columns():
    return [*columns()[:2], est.indicator_column(columns()[2])]


LINEAR = {
    "linear_regressor": (lambda **options: est.LinearRegressor(columns(), **options), Y),
    "linear_classifier": (lambda **options: est.LinearClassifier(columns(), **options), BINARY),
    "linear_classifier_of_3": (lambda **options: est.LinearClassifier(columns(), n_classes=3, **options), CLASSES),
}
DEEP = {
    "dnn_regressor": (lambda **options: est.DNNRegressor([4], dense_columns(), **options), Y),
    "dnn_classifier": (lambda **options: est.DNNClassifier([4], dense_columns(), **options), BINARY),
    "dnn_classifier_of_3": (lambda **options: est.DNNClassifier([4], dense_columns(), n_classes=3, **options), CLASSES),
    "combined_regressor": (lambda **options: est.DNNLinearCombinedRegressor(
        linear_feature_columns=columns(), dnn_feature_columns=dense_columns(), dnn_hidden_units=[4], **options), Y),
    "combined_classifier": (lambda **options: est.DNNLinearCombinedClassifier(
        linear_feature_columns=columns(), dnn_feature_columns=dense_columns(), dnn_hidden_units=[4],
        **options), BINARY),
}


def assert_same_logs(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, err_msg=name, **tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Could not find trained model")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_estimators_have_tensorflows_metrics_and_predictions(tmp_path, name, weighted, replicas):
    make, labels = LINEAR[name]
    expected = RECORDED[f"{name}_weighted" if weighted else name]
    strategy = trainer.distribute.MirroredStrategy([f"cpu:{number}" for number in range(replicas)])
    made = make(config=est.RunConfig(tmp_path, eval_distribute=strategy),
                **({"weight_column": "weight"} if weighted else {}))
    assert_same_logs(made.evaluate(lambda: Batches(labels, weighted)), expected["before"], rtol=1e-5, atol=1e-6)
    made.train(lambda: Batches(labels, weighted, repeat=True), steps=20)
    assert_same_logs(made.evaluate(lambda: Batches(labels, weighted)), expected["after"], rtol=2e-4, atol=1e-6)
    prediction = next(made.predict(lambda: Batches(labels, weighted)))
    assert prediction.keys() == expected["prediction"].keys()
    for key, values in expected["prediction"].items():
        ours = prediction[key].tolist()
        if isinstance(values[0], str):
            assert [each.decode() for each in ours] == values
        else:
            np.testing.assert_allclose(ours, values, rtol=2e-4, err_msg=key)


def our_name(name):
    return name.replace("bias_weights", "bias").removeprefix("dnn/").removeprefix("linear/")


class BeginWith(est.SessionRunHook):
    """Gives a training the weights that TensorFlow's began with."""

    def __init__(self, weights):
        self._weights = {our_name(name): np.array(value, np.float32) for name, value in weights.items()}
        self.unused = set(self._weights)

    def after_create_session(self, session, coord):
        params = session.state.params
        leaves = {}
        for path, leaf in named_leaves(params).items():
            found = next(name for name in self._weights if path.endswith(name))
            self.unused.discard(found)
            leaves[path] = jnp.asarray(self._weights[found].reshape(leaf.shape))
        session.state = session.state.replace(params=with_leaves(params, leaves))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_deep_estimators_go_tensorflows_way(tmp_path, name):
    make, labels = DEEP[name]
    expected = RECORDED[name]
    begin = BeginWith(expected["weights_at_0"])
    made = make(model_dir=tmp_path).train(lambda: Batches(labels, repeat=True), hooks=[begin], steps=20)
    assert not begin.unused
    ours = {variable.removeprefix("params/"): made.get_variable_value(variable)
            for variable in made.get_variable_names() if variable.startswith("params/")}
    for tensor, value in expected["weights_at_20"].items():
        path = next(path for path in ours if path.endswith(our_name(tensor)))
        before = np.array(expected["weights_at_0"][tensor])
        way = max(np.abs(np.array(value) - before).max(), 1e-4)
        difference = np.abs(ours[path].reshape(np.shape(value)) - np.array(value)).max()
        assert difference <= 2e-3 * way, (tensor, difference, way)
    assert_same_logs(made.evaluate(lambda: Batches(labels)), expected["after"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_baseline_learns_the_mean(tmp_path):
    regressor = est.BaselineRegressor(tmp_path / "regressor").train(lambda: Batches(Y, repeat=True), steps=300)
    mean_of_batches = np.mean([Y[:2].mean(), Y[2:4].mean(), Y[4:].mean()])
    prediction = next(regressor.predict(lambda: Batches(Y)))["predictions"]
    np.testing.assert_allclose(prediction, [mean_of_batches], atol=0.02)
    classifier = est.BaselineClassifier(tmp_path / "classifier", n_classes=3, optimizer="SGD")
    classifier.train(lambda: ({"x": X}, CLASSES), steps=300)
    shares = next(classifier.predict(lambda: {"x": X}))["probabilities"]
    np.testing.assert_allclose(shares, [0.4, 0.4, 0.2], atol=1e-3)


def test_labels_that_are_none_of_the_task_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Labels must be in range \[0, 1\]. Received: 2"):
        est.LinearClassifier(columns(), tmp_path / "1").train(lambda: Batches(BINARY + 1), steps=3)
    with pytest.raises(ValueError, match=r"whole numbers from 0 to n_classes - 1 = 2. Received: 5"):
        est.LinearClassifier(columns(), tmp_path / "2", n_classes=3).train(lambda: Batches(CLASSES + 5), steps=3)
    named = np.array(["no", "maybe"])[BINARY]
    with pytest.raises(ValueError, match="'maybe' is not in `label_vocabulary`"):
        est.LinearClassifier(columns(), tmp_path / "3", label_vocabulary=["no", "yes"]).train(
            lambda: Batches(named), steps=3)
    with pytest.raises(ValueError, match="You must provide labels"):
        est.LinearRegressor(columns(), tmp_path / "4").train(lambda: {"x": X, "age": AGE, "city": CITY}, steps=3)


@pytest.mark.slow
def test_names_are_labels_where_there_is_a_vocabulary(tmp_path):
    named = np.array(["no", "yes"])[BINARY]
    made = est.LinearClassifier(columns(), tmp_path, label_vocabulary=["no", "yes"])
    made.train(lambda: Batches(named, repeat=True), steps=5)
    prediction = next(made.predict(lambda: Batches(named)))
    found = [[name.decode() for name in prediction[key]] for key in ("classes", "all_classes")]
    assert found == RECORDED["names_as_labels"]


@pytest.mark.parametrize(("count", "name"), [(4, "learning_rate_of_a_linear_model_of_4_columns"),
                                             (100, "learning_rate_of_a_linear_model_of_100_columns")])
def test_learning_rates_follow_the_number_of_columns(count, name):
    found = common.linear_learning_rate([est.numeric_column(str(number)) for number in range(count)],
                                        linear.MOST_LEARNING_RATE)
    assert found == pytest.approx(RECORDED[name])


@pytest.mark.parametrize("optimizer", ["adagrad", "Adamax"])
def test_an_unknown_optimizer_is_refused_at_once(optimizer):
    with pytest.raises(ValueError, match="Unknown optimizer name"):
        est.LinearRegressor(columns(), optimizer=optimizer)


def logs_of(head, logits, labels):
    """Returns the loss and the metrics of a head."""
    encoded, outputs = jnp.asarray(head.encoded_labels(labels)), jnp.asarray(logits)
    found = {"loss": float(head.loss()(encoded, outputs))}
    for metric in head.metrics():
        metric.update_state(encoded, outputs)
        found[metric.name] = float(metric.result())
    return found


@pytest.mark.slow
def test_thresholds_of_a_binary_head():
    head = est.BinaryClassHead(thresholds=[0.3])
    found = logs_of(head, np.array([[-1.0], [0.5], [2.0]], np.float32), np.array([[0], [1], [1]]))
    del found["loss"]
    assert_same_logs(found, RECORDED["thresholds_of_a_binary_head"], rtol=1e-5)


@pytest.mark.slow
def test_a_multi_label_head():
    logits = np.array([[-1.0, 0.5, 2.0], [0.1, -0.3, 1.0]], np.float32)
    found = logs_of(est.MultiLabelHead(3), logits, np.array([[0, 1, 1], [1, 0, 1]]))
    assert_same_logs(found, RECORDED["a_multi_label_head"], rtol=1e-5)


@pytest.mark.slow
def test_a_multi_head_adds_losses_up_and_names_metrics_by_heads():
    head = est.MultiHead([est.RegressionHead(name="size"), est.BinaryClassHead(name="kind")], head_weights=[1.0, 2.0])
    labels = {"size": np.array([[1.5], [1.0]], np.float32), "kind": np.array([[0], [1]])}
    found = logs_of(head, np.array([[1.0, -1.0], [2.0, 0.5]], np.float32), labels)
    assert found.pop("loss") == pytest.approx(RECORDED["a_multi_head"]["loss"], rel=1e-5)
    assert sorted(found) == RECORDED["a_multi_head"]["names"]


@pytest.mark.slow
def test_a_multi_head_is_trained_and_predicts_by_head(tmp_path):
    from flax import linen as nn

    head = est.MultiHead([est.RegressionHead(name="size"), est.MultiClassHead(3, name="kind")])

    def model_fn(features, labels, mode):
        return head.create_estimator_spec(mode, nn.Dense(head.logits_dimension), "adam")

    made = est.Estimator(model_fn, tmp_path)
    made.train(lambda: (X, {"size": Y, "kind": CLASSES}), steps=3)
    logs = made.evaluate(lambda: (X, {"size": Y, "kind": CLASSES}), steps=1)
    assert logs["loss"] == pytest.approx(logs["loss/size"] + logs["loss/kind"], rel=1e-5)
    prediction = next(made.predict(lambda: X))
    assert prediction[("size", "predictions")].shape == (1,)
    assert prediction[("kind", "classes")][0] in (b"0", b"1", b"2")
