"""Cases to compare with Keras: for each public name, arguments and the kind of inputs.

A name that is public in Keras or here, and has no case, fails `tests/project/test_keras_names.py`.
"""

from __future__ import annotations

from typing import Any

from trainer import metrics
from trainer.losses import registry

Case = tuple[dict[str, Any], str]

_ERRORS: list[Case] = [({}, kind) for kind in ("numbers", "column", "sequences of numbers", "bits and numbers")]

LOSSES: dict[str, list[Case]] = {
    "MeanSquaredError": _ERRORS,
    "MeanAbsoluteError": _ERRORS,
    "MeanAbsolutePercentageError": _ERRORS,
    "MeanSquaredLogarithmicError": [({}, "numbers"), ({}, "positive numbers")],
    "LogCosh": _ERRORS,
    "Huber": [*_ERRORS, ({"delta": 0.5}, "numbers")],
    "CosineSimilarity": [({}, "numbers"), ({"axis": 1}, "sequences of numbers"), ({}, "column")],
    "BinaryCrossentropy": [
        ({}, "bits"), ({}, "bit column"), ({}, "shares"), ({"from_logits": True}, "bits and numbers"),
        ({"label_smoothing": 0.2}, "bits"), ({"axis": 1}, "one-hot sequences")],
    "CategoricalCrossentropy": [
        ({}, "one-hot"), ({}, "one-hot sequences"), ({"from_logits": True}, "one-hot and logits"),
        ({"label_smoothing": 0.2}, "one-hot"), ({"axis": 1}, "one-hot, classes second"), ({}, "distributions")],
    "SparseCategoricalCrossentropy": [
        ({}, "indices"), ({}, "index column"), ({}, "index sequences"), ({}, "indices, one step"),
        ({"from_logits": True}, "indices and logits"), ({"ignore_class": 0}, "indices"),
        ({"ignore_class": 0}, "index sequences")],
    "KLDivergence": [({}, "distributions"), ({}, "shares"), ({}, "bit column")],
    "Poisson": [({}, "counts"), ({}, "positive numbers")],
    "Hinge": [({}, "signs"), ({}, "bits and numbers"), ({}, "numbers")],
    "SquaredHinge": [({}, "signs"), ({}, "bits and numbers")],
    "CategoricalHinge": [({}, "one-hot"), ({}, "one-hot and logits")],
    "BinaryFocalCrossentropy": [
        ({}, "bits"), ({}, "bit column"), ({"apply_class_balancing": True, "alpha": 0.4, "gamma": 1.5}, "bits"),
        ({"from_logits": True, "label_smoothing": 0.1}, "bits and moderate numbers")],
    "CategoricalFocalCrossentropy": [
        ({}, "one-hot"), ({"alpha": [0.1, 0.2, 0.3], "gamma": 1.0}, "one-hot"),
        ({"from_logits": True, "label_smoothing": 0.1}, "one-hot and logits")],
    "CategoricalGeneralizedCrossEntropy": [({}, "indices"), ({"q": 0.8}, "indices")],
    "CTC": [({}, "label sequences")],
    "Circle": [({}, "embeddings"), ({"gamma": 10.0, "margin": 0.2, "remove_diagonal": False}, "embeddings")],
    "Dice": [({}, "masks"), ({"axis": (1, 2, 3)}, "masks"), ({}, "bits")],
    "Tversky": [({}, "masks"), ({"alpha": 0.3, "beta": 0.7, "axis": (1, 2, 3)}, "masks")],
}

#: The function of each class.
LOSS_FUNCTIONS = {cls.function.__name__: cls.__name__ for cls in registry.CLASSES if cls.__name__ in LOSSES}

_COUNTS: list[Case] = [({}, "bits"), ({}, "bit per row"), ({}, "bit column"), ({"thresholds": [0.2, 0.7]}, "bits"),
                       ({"thresholds": 0.3}, "tenths")]
_RATIOS: list[Case] = [
    *_COUNTS, ({"thresholds": [0.0, 0.5, 1.0]}, "tenths"), ({"top_k": 2}, "bits"),
    ({"top_k": 2, "class_id": 1}, "bits"), ({"class_id": 0, "thresholds": 0.4}, "bits"),
    ({"top_k": 1, "thresholds": 0.4}, "bits")]


def _at(argument: str) -> list[Case]:
    return [({argument: 0.4}, "bit per row"), ({argument: 0.7, "num_thresholds": 5}, "bits"),
            ({argument: 0.3, "num_thresholds": 1}, "bits"), ({argument: 0.4, "class_id": 1}, "bits"),
            ({argument: 0.9}, "tenths")]


METRICS: dict[str, list[Case]] = {
    "Mean": [({}, "values"), ({}, "value table")],
    "Sum": [({}, "values"), ({}, "value table")],
    **dict.fromkeys(("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError",
                     "LogCoshError"), _ERRORS),
    "MeanSquaredLogarithmicError": [({}, "positive numbers"), ({}, "numbers")],
    "MeanMetricWrapper": [({"fn": "mean_squared_error"}, "numbers"), ({"fn": "huber", "delta": 0.5}, "numbers")],
    "CosineSimilarity": [({}, "numbers"), ({"axis": 1}, "sequences of numbers")],
    "PearsonCorrelation": [({}, "moderate"), ({"axis": 1}, "moderate sequences")],
    "ConcordanceCorrelation": [({}, "moderate"), ({"axis": 1}, "moderate sequences")],
    "R2Score": [({}, "moderate"), ({"class_aggregation": None}, "moderate"),
                ({"class_aggregation": "variance_weighted_average"}, "moderate"), ({"num_regressors": 1}, "moderate")],
    "Accuracy": [({}, "class pairs"), ({}, "class pairs of sequences")],
    "BinaryAccuracy": [({}, "bits"), ({}, "bit column"), ({}, "bit per row"), ({"threshold": 0.3}, "tenths")],
    "CategoricalAccuracy": [({}, "one-hot"), ({}, "one-hot sequences")],
    "SparseCategoricalAccuracy": [({}, "indices"), ({}, "index column"), ({}, "index sequences"),
                                  ({}, "indices, one step")],
    "TopKCategoricalAccuracy": [({"k": 2}, "one-hot"), ({"k": 2}, "one-hot sequences"), ({}, "one-hot")],
    "SparseTopKCategoricalAccuracy": [({"k": 2}, "indices"), ({"k": 2}, "index column"), ({"k": 2}, "index sequences"),
                                      ({"k": 2, "from_sorted_ids": True}, "ranked")],
    "BinaryCrossentropy": [({}, "bits"), ({"from_logits": True, "label_smoothing": 0.1}, "bits and numbers")],
    "CategoricalCrossentropy": [({}, "one-hot"), ({}, "one-hot sequences"), ({"label_smoothing": 0.1}, "one-hot"),
                                ({"from_logits": True}, "one-hot and logits")],
    "SparseCategoricalCrossentropy": [({}, "indices"), ({}, "index column"), ({}, "index sequences"),
                                      ({"from_logits": True}, "indices and logits")],
    "KLDivergence": [({}, "distributions")],
    "Poisson": [({}, "counts")],
    "Hinge": [({}, "signs"), ({}, "bits and numbers")],
    "SquaredHinge": [({}, "signs")],
    "CategoricalHinge": [({}, "one-hot")],
    **dict.fromkeys(("TruePositives", "FalsePositives", "TrueNegatives", "FalseNegatives"), _COUNTS),
    "Precision": _RATIOS,
    "Recall": _RATIOS,
    "SensitivityAtSpecificity": _at("specificity"),
    "SpecificityAtSensitivity": _at("sensitivity"),
    "PrecisionAtRecall": _at("recall"),
    "RecallAtPrecision": _at("precision"),
    "AUC": [
        *[({"curve": curve, "summation_method": method}, "bit per row")
          for curve in ("ROC", "PR", "PRGAIN") for method in ("interpolation", "majoring", "minoring")],
        ({}, "bits"), ({}, "tenths"), ({"num_thresholds": 11}, "tenths"), ({"thresholds": [0.8, 0.1, 0.4]}, "bits"),
        ({"from_logits": True}, "bits and numbers"), ({"multi_label": True}, "bits"),
        ({"multi_label": True, "num_labels": 3, "label_weights": [1.0, 0.5, 2.0]}, "bits"),
        ({"label_weights": [1.0, 0.5, 2.0]}, "bits")],
    "FBetaScore": [({"average": average, "beta": 2.0, "threshold": threshold}, "bits")
                   for average in (None, "micro", "macro", "weighted") for threshold in (None, 0.5)],
    "F1Score": [({}, "one-hot"), ({"average": "macro"}, "bits")],
    "IoU": [({"num_classes": 3, "target_class_ids": [0, 2], "dtype": "float32"}, "class pairs"),
            ({"num_classes": 3, "target_class_ids": [0, 2], "dtype": "float32", "ignore_class": 1}, "class pairs")],
    "BinaryIoU": [({"threshold": 0.4, "dtype": "float32"}, "bit per row")],
    "MeanIoU": [({"num_classes": 3, "dtype": "float32"}, "class pairs"),
                ({"num_classes": 3, "sparse_y_pred": False, "dtype": "float32"}, "indices")],
    "OneHotIoU": [({"num_classes": 3, "target_class_ids": [1], "dtype": "float32"}, "one-hot")],
    "OneHotMeanIoU": [({"num_classes": 3, "dtype": "float32"}, "one-hot")],
}

#: The class whose cases a function of `metrics` has.
METRIC_FUNCTIONS = {
    **{name: cls for name, cls in LOSS_FUNCTIONS.items() if hasattr(metrics, name) and name != "cosine_similarity"},
    "binary_accuracy": "BinaryAccuracy",
    "categorical_accuracy": "CategoricalAccuracy",
    "sparse_categorical_accuracy": "SparseCategoricalAccuracy",
    "top_k_categorical_accuracy": "TopKCategoricalAccuracy",
    "sparse_top_k_categorical_accuracy": "SparseTopKCategoricalAccuracy",
    "pearson_correlation": "PearsonCorrelation",
    "concordance_correlation": "ConcordanceCorrelation",
}

_COMMON: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.1, "clipnorm": 1.0}, {"clipvalue": 0.5, "gradient_accumulation_steps": 2},
    {"global_clipnorm": 1.0, "learning_rate": 0.5}, {"learning_rate": "schedule"},
    {"learning_rate": "schedule", "gradient_accumulation_steps": 2, "weight_decay": 0.01}]

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("Adadelta", "Adamax", "AdamW", "Lamb", "Nadam"), _COMMON),
    "SGD": [*_COMMON, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [*_COMMON, {"amsgrad": True, "beta_1": 0.5}],
    "RMSprop": [*_COMMON, {"momentum": 0.9, "centered": True}],
    "Adagrad": [*_COMMON, {"initial_accumulator_value": 0.0}],
    "Adafactor": [*_COMMON, {"beta_2_decay": -0.5, "clip_threshold": 0.5}],
    "Lion": [*_COMMON, {"beta_1": 0.5}],
    "Ftrl": [*_COMMON, {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.1, "beta": 0.1}],
    "Muon": [*_COMMON, {"nesterov": False, "rms_rate": None, "adam_lr_ratio": 0.5}],
    "ScheduleFreeAdamW": [*_COMMON, {"warmup_steps": 3}],
}

SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "ExponentialDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5, "staircase": staircase}
        for staircase in (False, True)],
    "InverseTimeDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5, "staircase": staircase}
        for staircase in (False, True)],
    "PiecewiseConstantDecay": [{"boundaries": [3, 6], "values": [1.0, 0.5, 0.1]}],
    "PolynomialDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 4, "power": power, "cycle": cycle}
        for power in (1.0, 2.0) for cycle in (False, True)],
    "CosineDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 4, "alpha": 0.1},
        {"initial_learning_rate": 0.0, "decay_steps": 4, "warmup_target": 0.1, "warmup_steps": 3}],
    "CosineDecayRestarts": [
        {"initial_learning_rate": 0.1, "first_decay_steps": 3},
        {"initial_learning_rate": 0.1, "first_decay_steps": 3, "t_mul": 1.0, "m_mul": 0.5, "alpha": 0.1},
        {"initial_learning_rate": 0.1, "first_decay_steps": 2, "t_mul": 1.5, "m_mul": 0.8}],
}

REGULARIZERS: dict[str, list[dict[str, Any]]] = {
    "L1": [{}, {"l1": 0.5}], "L2": [{}, {"l2": 0.5}], "L1L2": [{}, {"l1": 0.1, "l2": 0.2}],
    "OrthogonalRegularizer": [{}, {"factor": 0.5, "mode": "columns"}]}

#: Positional and named arguments.
UTILS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "to_categorical": [(([0, 2, 1],), {}), (([[0], [2]],), {"num_classes": 4}), (([[0, 1], [2, 0]],), {}),
                       (([],), {"num_classes": 2})],
    "normalize": [(([[3.0, 4.0], [0.0, 0.0]],), {}), (([[1.0, -2.0], [3.0, 4.0]],), {"axis": 0, "order": 1}),
                  (([3.0, 4.0],), {})],
    "pad_sequences": [
        (([[1], [2, 3], [4, 5, 6]],), {}), (([[1], [2, 3], [4, 5, 6]],), {"maxlen": 2}),
        (([[1], [2, 3], [4, 5, 6]],), {"maxlen": 2, "padding": "post", "truncating": "post", "value": -1}),
        (([[[1, 2]], [[3, 4], [5, 6]]],), {"dtype": "float32"}), (([[], [1]],), {})],
}
