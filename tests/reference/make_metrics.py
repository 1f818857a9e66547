"""Writes metrics.json: what Keras computes for the metrics that `trainer.metrics` has too, and NumPy for the others.

Origin of the numbers: Keras 3.15.1, JAX backend. Run, where that is installed:
`KERAS_BACKEND=jax python tests/reference/make_metrics.py`
"""

import json
import pathlib

import keras
import numpy as np

random = np.random.default_rng(0)  # cases that are added at the end leave all others as they are

# The rows of the two updates: of different sizes, so that a mean of means would be noticed.
ROWS = (6, 3)


def probabilities(*shape):
    values = random.uniform(0.05, 1.0, shape)
    return (values / values.sum(-1, keepdims=True)).round(4)


def numbers(*shape):
    return random.normal(0, 2, shape).round(4)


def one_hot(*shape):
    return np.eye(4)[random.integers(0, 4, shape)]


# Labels and predictions of a batch of `n` rows; values alone for metrics that take no labels.
DATA = {
    "values": lambda n: (numbers(n),),
    "value_table": lambda n: (numbers(n, 4),),
    "features": lambda n: (numbers(n, 4), numbers(n, 4)),
    "column": lambda n: (numbers(n), numbers(n, 1)),
    "counts": lambda n: (random.integers(0, 5, (n, 4)), random.uniform(0, 4, (n, 4)).round(4)),
    "integers": lambda n: (random.integers(0, 3, (n, 4)), random.integers(0, 3, (n, 4))),
    "signs": lambda n: (random.choice([-1, 1], (n, 4)), numbers(n, 4)),
    "distributions": lambda n: (probabilities(n, 4), probabilities(n, 4)),
    "one_hot": lambda n: (one_hot(n), probabilities(n, 4)),
    "one_hot_logits": lambda n: (one_hot(n), numbers(n, 4)),
    "one_hot_sequences": lambda n: (one_hot(n, 5), probabilities(n, 5, 4)),
    "indices": lambda n: (random.integers(0, 4, n), probabilities(n, 4)),
    "column_of_indices": lambda n: (random.integers(0, 4, (n, 1)), probabilities(n, 4)),
    "sequences": lambda n: (random.integers(0, 4, (n, 5)), probabilities(n, 5, 4)),
    "sorted_ids": lambda n: (random.integers(0, 4, n), np.argsort(-random.random((n, 4)), axis=-1)),
    "yes_or_no": lambda n: (random.integers(0, 2, n), random.uniform(0, 1, n).round(4)),
    # Scores that equal thresholds.
    "tenths": lambda n: (random.integers(0, 2, n), random.integers(0, 11, n) / 10),
    "labels": lambda n: (random.integers(0, 2, (n, 4)), random.uniform(0, 1, (n, 4)).round(4)),
    "label_logits": lambda n: (random.integers(0, 2, (n, 4)), numbers(n, 4)),
    "classes": lambda n: (random.integers(0, 4, n), random.integers(0, 4, n)),
    "classes_and_void": lambda n: (random.integers(0, 5, n), random.integers(0, 4, n)),
    "all_positive": lambda n: (np.ones(n), random.uniform(0, 1, n).round(4)),
}

# (class, arguments, data)
CASES = [
    *[(name, {}, data) for data in ("values", "value_table") for name in ("Mean", "Sum")],
    *[(name, {}, data) for data in ("features", "column") for name in (
        "MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError",
        "MeanSquaredLogarithmicError", "LogCoshError")],
    *[(name, {}, "features") for name in ("CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation")],
    ("R2Score", {}, "features"),
    ("R2Score", {"class_aggregation": None}, "features"),
    ("R2Score", {"class_aggregation": "variance_weighted_average"}, "features"),
    ("R2Score", {"num_regressors": 2}, "features"),
    ("Accuracy", {}, "integers"),
    ("BinaryAccuracy", {}, "labels"),
    ("BinaryAccuracy", {"threshold": 0.3}, "labels"),
    ("CategoricalAccuracy", {}, "one_hot"),
    ("CategoricalAccuracy", {}, "one_hot_sequences"),
    ("TopKCategoricalAccuracy", {"k": 2}, "one_hot"),
    ("SparseCategoricalAccuracy", {}, "indices"),
    ("SparseCategoricalAccuracy", {}, "column_of_indices"),
    ("SparseCategoricalAccuracy", {}, "sequences"),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, "indices"),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, "sequences"),
    ("SparseTopKCategoricalAccuracy", {"k": 2, "from_sorted_ids": True}, "sorted_ids"),
    ("BinaryCrossentropy", {}, "labels"),
    ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, "label_logits"),
    ("CategoricalCrossentropy", {}, "one_hot"),
    ("CategoricalCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, "one_hot_logits"),
    ("SparseCategoricalCrossentropy", {}, "indices"),
    ("SparseCategoricalCrossentropy", {}, "sequences"),
    ("KLDivergence", {}, "distributions"),
    ("Poisson", {}, "counts"),
    *[(name, {}, "signs") for name in ("Hinge", "SquaredHinge")],
    ("CategoricalHinge", {}, "one_hot"),
    *[(name, arguments, data) for name in ("TruePositives", "FalsePositives", "TrueNegatives", "FalseNegatives")
      for arguments, data in (({}, "yes_or_no"), ({"thresholds": [0.7, 0.2]}, "labels"))],
    *[(name, arguments, data) for name in ("Precision", "Recall") for arguments, data in (
        ({}, "yes_or_no"),
        ({"thresholds": [0.0, 0.5, 1.0]}, "tenths"),
        ({"thresholds": 0.3, "class_id": 2}, "labels"),
        ({"top_k": 2}, "labels"),
        ({"top_k": 2, "class_id": 1}, "labels"))],
    *[(name, {argument: value}, "yes_or_no") for name, argument, value in (
        ("SensitivityAtSpecificity", "specificity", 0.4), ("SpecificityAtSensitivity", "sensitivity", 0.4),
        ("PrecisionAtRecall", "recall", 0.6), ("RecallAtPrecision", "precision", 0.6))],
    ("SensitivityAtSpecificity", {"specificity": 0.4, "num_thresholds": 1}, "labels"),
    *[("AUC", {"curve": curve, "summation_method": method}, "yes_or_no")
      for curve in ("ROC", "PR", "PRGAIN") for method in ("interpolation", "majoring", "minoring")],
    ("AUC", {"num_thresholds": 11}, "tenths"),
    ("AUC", {"thresholds": [0.8, 0.1, 0.4]}, "labels"),
    ("AUC", {"from_logits": True}, "label_logits"),
    ("AUC", {"label_weights": [1.0, 0.5, 2.0, 0.0]}, "labels"),
    ("AUC", {"multi_label": True}, "labels"),
    ("AUC", {"multi_label": True, "num_labels": 4, "label_weights": [1.0, 0.5, 2.0, 0.0], "curve": "PR"}, "labels"),
    ("AUC", {}, "all_positive"),
    *[("FBetaScore", {"average": average, "beta": 2.0, "threshold": threshold}, "labels")
      for average in (None, "micro", "macro", "weighted") for threshold in (None, 0.5)],
    ("F1Score", {}, "one_hot"),
    ("IoU", {"num_classes": 4, "target_class_ids": [0, 2], "dtype": "float32"}, "classes"),
    ("IoU", {"num_classes": 4, "target_class_ids": [1], "ignore_class": 4, "dtype": "float32"}, "classes_and_void"),
    ("BinaryIoU", {"threshold": 0.4, "dtype": "float32"}, "yes_or_no"),
    ("MeanIoU", {"num_classes": 4, "dtype": "float32"}, "classes"),
    ("MeanIoU", {"num_classes": 4, "sparse_y_pred": False, "dtype": "float32"}, "indices"),
    ("OneHotIoU", {"num_classes": 4, "target_class_ids": [3], "dtype": "float32"}, "one_hot"),
    ("OneHotMeanIoU", {"num_classes": 4, "dtype": "float32"}, "one_hot"),
    *[("ExpectedCalibrationError", arguments, data) for arguments, data in (
        ({}, "one_hot"), ({"num_bins": 4}, "indices"), ({}, "sequences"), ({"num_bins": 10}, "tenths"),
        ({"from_logits": True}, "one_hot_logits"))],
]


def as_32_bits(values):
    return values.astype("float32" if values.dtype.kind == "f" else "int32")


def expected_calibration_error(batches, weights, num_bins=15, from_logits=False):
    rows = []  # confidence, hit and weight of each prediction
    for (labels, predictions), batch_weights in zip(batches, weights, strict=True):
        if from_logits:
            predictions = np.exp(predictions) / np.exp(predictions).sum(-1, keepdims=True)
        if predictions.ndim == 1:
            confidences, hits = predictions, labels
        else:
            classes = labels.argmax(-1) if labels.shape == predictions.shape else labels
            confidences, hits = predictions.max(-1), predictions.argmax(-1) == classes
        weight = np.ones(confidences.shape) if batch_weights is None else batch_weights
        rows += zip(confidences.ravel(), hits.ravel(), weight.ravel(), strict=True)
    confidences, hits, weight = np.array(rows, float).T
    edges = np.linspace(0, 1, num_bins + 1)
    bins = np.searchsorted(edges[1:-1], confidences, side="left")  # a bin has its upper edge
    gaps = [abs((weight * (confidences - hits))[bins == number].sum()) for number in range(num_bins)]
    return sum(gaps) / weight.sum()


# Metrics that Keras lacks: functions of the batches, the weights (or None) and the arguments that return the result.
BY_HAND = {"ExpectedCalibrationError": expected_calibration_error}


def result(name, arguments, batches, weights):
    if name in BY_HAND:
        assert not hasattr(keras.metrics, name), f"Keras has {name}: take its numbers"
        return np.asarray(BY_HAND[name](batches, weights, **arguments)).tolist()
    metric = getattr(keras.metrics, name)(**arguments)
    for batch, weight in zip(batches, weights, strict=True):
        metric.update_state(*map(as_32_bits, batch), sample_weight=None if weight is None else as_32_bits(weight))
    return np.asarray(metric.result()).tolist()


def case(name, arguments, data):
    batches = [DATA[data](n) for n in ROWS]
    # One weight per row; for sequences one per step.
    shapes = [batch[0].shape if data == "sequences" else batch[0].shape[:1] for batch in batches]
    weights = [random.uniform(0.2, 2, shape).round(4) for shape in shapes]
    return {
        "name": name,
        "arguments": arguments,
        "data": data,
        "batches": [[values.tolist() for values in batch] for batch in batches],
        "weights": [weight.tolist() for weight in weights],
        "result": result(name, arguments, batches, [None, None]),
        "weighted_result": result(name, arguments, batches, weights),
    }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case(*described)) for described in CASES)
    origin = json.dumps(f"Keras {keras.__version__}, JAX backend")
    path = pathlib.Path(__file__).with_name("metrics.json")
    path.write_text(f'{{"origin": {origin}, "cases": [\n{lines}\n]}}\n')
