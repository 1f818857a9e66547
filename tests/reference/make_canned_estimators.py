"""Records what TensorFlow 2.15's canned estimators and heads compute: `python make_canned_estimators.py`, as there.

See make_estimator.py, next to which it must lie.
"""

from __future__ import annotations

import os
import tempfile

import numpy as np
import tensorflow as tf
from make_estimator import BEHAVIOURS, X, Y, behaviour, error_of, est, write

BEHAVIOURS.clear()
AGE = np.array([[18.0], [30.0], [45.0], [60.0], [22.0]], np.float32)
CITY = np.array([["rome"], ["oslo"], ["rome"], ["lima"], ["oslo"]])
WEIGHT = np.array([[1.0], [2.0], [0.5], [1.0], [3.0]], np.float32)
BINARY = np.array([[0], [1], [1], [0], [1]])
CLASSES = np.array([[0], [1], [2], [0], [1]])


def features(weighted):
    found = {"age": AGE, "city": CITY, "x": X}
    return {**found, "weight": WEIGHT} if weighted else found


def canned_data(labels, weighted, batch_size):
    return tf.data.Dataset.from_tensor_slices((features(weighted), labels)).batch(batch_size)


def columns():
    column = tf.feature_column
    return [column.numeric_column("x", shape=(2,)),
            column.bucketized_column(column.numeric_column("age"), [20.0, 40.0]),
            column.categorical_column_with_vocabulary_list("city", ["rome", "oslo"])]


def dense_columns():
    column = tf.feature_column
    return [*columns()[:2], column.indicator_column(columns()[2])]


# TensorFlow 2.15 cannot run its baselines on a dataset: it never initializes the iterator.
CANNED = {
    "linear_regressor": (lambda **options: est.LinearRegressor(columns(), **options), Y),
    "linear_classifier": (lambda **options: est.LinearClassifier(columns(), **options), BINARY),
    "linear_classifier_of_3": (lambda **options: est.LinearClassifier(columns(), n_classes=3, **options), CLASSES),
}


def canned_results(name, weighted):
    """Returns metrics before and after 20 steps of 2 rows, and the first predictions after them."""
    make, labels = CANNED[name]
    made = make(model_dir=tempfile.mkdtemp(), **({"weight_column": "weight"} if weighted else {}))
    before = made.evaluate(lambda: canned_data(labels, weighted, 2))
    made.train(lambda: canned_data(labels, weighted, 2).repeat(), steps=20)
    after = made.evaluate(lambda: canned_data(labels, weighted, 2))
    prediction = next(made.predict(lambda: canned_data(labels, weighted, 2)))
    return {"before": {key: float(value) for key, value in before.items()},
            "after": {key: float(value) for key, value in after.items()},
            "prediction": {key: [each.decode() if isinstance(each, bytes) else float(each) for each in value]
                           for key, value in prediction.items()}}


for _name in CANNED:
    for _weighted in (False, True):
        BEHAVIOURS[f"{_name}{'_weighted' if _weighted else ''}"] = (
            lambda name=_name, weighted=_weighted: canned_results(name, weighted))


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


def deep_results(name):
    """Returns the weights at the beginning, and metrics and weights after 20 steps from there."""
    make, labels = DEEP[name]
    folder = tempfile.mkdtemp()
    made = make(model_dir=folder, config=est.RunConfig(save_checkpoints_steps=20, tf_random_seed=3))
    made.train(lambda: canned_data(labels, False, 2).repeat(), steps=20)

    def weights(at):
        reader = tf.train.load_checkpoint(os.path.join(folder, f"model.ckpt-{at}"))
        return {key: reader.get_tensor(key).tolist() for key in reader.get_variable_to_shape_map()
                if "agrad" not in key and "trl" not in key and key.startswith(("dnn/", "linear/"))}

    after = made.evaluate(lambda: canned_data(labels, False, 2))
    return {"weights_at_0": weights(0), "weights_at_20": weights(20),
            "after": {key: float(value) for key, value in after.items()}}


for _name in DEEP:
    BEHAVIOURS[_name] = lambda name=_name: deep_results(name)


@behaviour
def labels_out_of_range():
    made = est.LinearClassifier(columns(), model_dir=tempfile.mkdtemp())
    return error_of(lambda: made.train(lambda: canned_data(BINARY + 1, False, 2)))


@behaviour
def names_as_labels():
    made = est.LinearClassifier(columns(), model_dir=tempfile.mkdtemp(), label_vocabulary=["no", "yes"])
    labels = np.array(["no", "yes"])[BINARY]
    made.train(lambda: canned_data(labels, False, 2).repeat(), steps=5)
    prediction = next(made.predict(lambda: canned_data(labels, False, 2)))
    return [[name.decode() for name in prediction[key]] for key in ("classes", "all_classes")]


@behaviour
def an_unknown_optimizer():
    return error_of(lambda: est.LinearRegressor(columns(), optimizer="Adamax"))


def learning_rate_of(count):
    column = tf.feature_column
    from tensorflow_estimator.python.estimator.canned import linear

    return float(linear._get_default_optimizer_v2([column.numeric_column(str(n)) for n in range(count)]).learning_rate)


@behaviour
def learning_rate_of_a_linear_model_of_4_columns():
    return learning_rate_of(4)


@behaviour
def learning_rate_of_a_linear_model_of_100_columns():
    return learning_rate_of(100)


@behaviour
def thresholds_of_a_binary_head():
    head = est.BinaryClassHead(thresholds=[0.3])
    logits = np.array([[-1.0], [0.5], [2.0]], np.float32)
    labels = np.array([[0], [1], [1]])
    metrics = head.update_metrics(head.metrics(), {}, tf.constant(logits), tf.constant(labels))
    return {key: float(metric.result()) for key, metric in metrics.items()}


@behaviour
def a_multi_label_head():
    head = est.MultiLabelHead(n_classes=3)
    logits = np.array([[-1.0, 0.5, 2.0], [0.1, -0.3, 1.0]], np.float32)
    labels = np.array([[0, 1, 1], [1, 0, 1]])
    metrics = head.update_metrics(head.metrics(), {}, tf.constant(logits), tf.constant(labels))
    loss = head.loss(tf.constant(labels), tf.constant(logits), {})
    return {"loss": float(loss), **{key: float(metric.result()) for key, metric in metrics.items()}}


@behaviour
def a_multi_head():
    head = est.MultiHead([est.RegressionHead(name="size"), est.BinaryClassHead(name="kind")], head_weights=[1.0, 2.0])
    logits = np.array([[1.0, -1.0], [2.0, 0.5]], np.float32)
    labels = {"size": np.array([[1.5], [1.0]], np.float32), "kind": np.array([[0], [1]])}
    loss = head.loss(labels, tf.constant(logits), {})
    metrics = head.update_metrics(head.metrics(), {}, tf.constant(logits), {
        name: tf.constant(label) for name, label in labels.items()})
    return {"loss": float(loss), "names": sorted(metrics)}


if __name__ == "__main__":
    write("canned_estimators.json")
