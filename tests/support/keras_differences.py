"""All that losses, metrics, optimizers, schedules, penalties and images do otherwise than Keras 3, on purpose.

`tests/reference/make_keras_differences.py` writes docs/keras_differences.md from this table, and
`tests/project/test_keras_differences.py` checks that each example still differs, and that the page is up to date.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Difference(NamedTuple):
    """One difference.

    Attributes:
      room: where it is: "losses", "metrics", "optimizers", "regularizers" or "utils".
      names: what it is about, in Markdown.
      keras: what Keras does.
      ours: what the trainer does.
      why: the reason.
      example: a function of a library, `trainer` or `keras`, whose outcomes differ.
    """

    room: str
    names: str
    keras: str
    ours: str
    why: str
    example: Callable[[Any], Any]


def _reals(*shape: int) -> np.ndarray:
    return np.linspace(0.1, 0.9, int(np.prod(shape)), dtype="float32").reshape(shape)


def _metric(metric: Any, *arguments: Any, **options: Any) -> Any:
    metric.update_state(*arguments, **options)
    return metric.result()


def _sum_of(metric: Any, *values: float) -> Any:
    for value in values:
        metric.update_state(np.array([value], "float32"))
    return metric.result()


def _over_batches(metric: Any, *options: dict[str, Any]) -> Any:
    for number, option in enumerate(options):
        metric.update_state((1 + number) * _reals(2 + number), **option)
    return metric.result()


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "losses", "all", "One weight per row, `(n,)`, fails for values of shape `(n, t)`, or weighs the wrong axis.",
        "A row's weight holds for all of its values.", "`sample_weight` of `fit` is one number per row.",
        lambda library: library.losses.MeanSquaredError()(
            _reals(4, 2, 3), np.zeros((4, 2, 3), "float32"), sample_weight=_reals(4))),
    Difference(
        "losses", "all", "The loss of no rows is an empty array, or NaN.", "It is 0.",
        "A replica of a custom loop may have no rows of a last batch.",
        lambda library: library.losses.MeanSquaredError()(np.zeros((0, 3), "float32"), np.zeros((0, 3), "float32"))),
    Difference(
        "losses", "all", "One number per row, `(n,)`, is taken for the features of one sample: its mean is one value.",
        "It is one value per row.", "Otherwise rows could not be weighted.",
        lambda library: library.losses.BinaryCrossentropy(reduction="sum")(
            np.array([0.0, 1.0], "float32"), np.array([0.2, 0.7], "float32"))),
    Difference(
        "losses", "all, with `reduction=None`", "With weights of shape `(n, 1)` the values get that shape.",
        "They keep their own.", "A weight says how much a value counts, and not where it stands.",
        lambda library: library.losses.MeanSquaredError(reduction=None)(
            _reals(4, 3), np.zeros((4, 3), "float32"), sample_weight=_reals(4, 1))),
    Difference(
        "losses", "all, of a single row", "With a scalar weight, `mean_with_sample_weight` does not divide by it.",
        "It divides, as for any other number of rows.", "The last batch of an epoch may be a single row.",
        lambda library: library.losses.MeanSquaredError(reduction="mean_with_sample_weight")(
            _reals(1, 3), np.zeros((1, 3), "float32"), sample_weight=0.5)),
    Difference(
        "losses", "all", "Labels `(n, 1)` and predictions `(n, k)` are broadcast.", "ValueError.",
        "It is nearly always a mistake, which trains to something else in silence.",
        lambda library: library.losses.MeanSquaredError()(_reals(4, 1), _reals(4, 3))),
    Difference(
        "losses", "all, with `dtype=\"float16\"` or `\"bfloat16\"`",
        "Values are computed in that dtype, in which the epsilon of 1e-7 does not exist near 1.",
        "They are computed in float32; the result has the dtype.", "A certain mistake must not cost infinity.",
        lambda library: library.losses.BinaryCrossentropy(dtype="float16")(
            np.array([[1.0], [0.0]], "float32"), np.array([[0.0], [1.0]], "float32"))),
    Difference(
        "losses", "`BinaryCrossentropy`, `Huber` and others",
        "Values such as `label_smoothing=2.0` or `delta=-1.0` pass.", "ValueError, which says what it may be.",
        "Mistakes are to be seen before anything is trained.",
        lambda library: library.losses.Huber(delta=-1.0)(_reals(2, 1), _reals(2, 1)) * 0),
    Difference(
        "losses", "`BinaryFocalCrossentropy(from_logits=True)`",
        "Logits become probabilities, which are clipped to [1e-7, 1 - 1e-7]: beyond about ±16 the loss is constant, "
        "and its gradient 0.", "The loss is that of the logits.", "A confident mistake must be unlearned.",
        lambda library: library.losses.BinaryFocalCrossentropy(from_logits=True)(
            np.zeros((1, 1), "float32"), np.full((1, 1), 50.0, "float32"))),
    Difference(
        "losses", "`CategoricalCrossentropy(axis=..., label_smoothing=...)`",
        "The smoothing is spread over as many classes as the last axis has.", "Over those of `axis`.",
        "Smoothed labels are to sum to 1.",
        lambda library: library.losses.CategoricalCrossentropy(axis=1, label_smoothing=0.3)(
            np.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], "float32"), np.full((1, 3, 2), 1 / 3, "float32"))),
    Difference(
        "losses", "`CategoricalCrossentropy`", "A single class costs 0, with a warning.", "ValueError.",
        "Nothing would be trained.",
        lambda library: library.losses.CategoricalCrossentropy(from_logits=True)(
            np.ones((2, 1), "float32"), np.ones((2, 1), "float32")) * 0),
    Difference(
        "losses", "`SparseCategoricalCrossentropy`", "Labels of a float dtype pass.", "ValueError.",
        "They are more likely one-hot, or regression targets.",
        lambda library: library.losses.SparseCategoricalCrossentropy()(
            np.array([0.0, 1.0], "float32"), np.array([[0.2, 0.8], [0.5, 0.5]], "float32"))),
    Difference(
        "losses", "`SparseCategoricalCrossentropy(axis=...)`", "Another axis than the last fails.", "It works.",
        "Images may have their channels first.",
        lambda library: library.losses.SparseCategoricalCrossentropy(axis=1)(
            np.array([[0, 1]], "int32"), np.full((1, 3, 2), 1 / 3, "float32"))),
    Difference(
        "losses", "`CategoricalGeneralizedCrossEntropy`",
        "Labels of shape `(n, 1)` are compared with the predictions of all rows.", "Each with those of its row.",
        "The mean over wrong pairs is no loss.",
        lambda library: library.losses.CategoricalGeneralizedCrossEntropy()(
            np.array([[0], [1]], "int32"), np.array([[0.2, 0.8], [0.9, 0.1]], "float32"))),
    Difference(
        "losses", "`get_config` of `Huber`, `CosineSimilarity`, `SparseCategoricalCrossentropy`",
        "Lacks `delta` and `axis`: what is made of it has the defaults.", "Has them.",
        "A configuration is to make an equal loss.",
        lambda library: library.losses.Huber.from_config(library.losses.Huber(delta=0.1).get_config())(
            np.zeros((1, 1), "float32"), np.ones((1, 1), "float32"))),
    Difference(
        "losses", "`losses.get`, `metrics.get`, and arguments", "A value of a wrong type is a ValueError.",
        "It is a TypeError.", "As in Python.", lambda library: library.losses.get(3)),
    Difference(
        "metrics", "all means", "A scalar weight counts once for each batch.", "Once for each row.",
        "The result must not depend on how rows are batched.",
        lambda library: _over_batches(library.metrics.Mean(), {"sample_weight": 1.0}, {"sample_weight": 1.0})),
    Difference(
        "metrics", "all", "Accumulators have the metric's dtype: float16 stops counting at 2048.",
        "They are float32; the result has the dtype.", "Sums over an epoch must stay exact.",
        lambda library: _sum_of(library.metrics.Sum(dtype="float16"), 2048.0, 1.0, 1.0)),
    Difference(
        "metrics", "`SparseCategoricalCrossentropy(ignore_class=...)`",
        "Without weights, samples to ignore count as 0; with weights, they do not count.", "They do not count.",
        "The mean must not change with weights that are all 1.",
        lambda library: _metric(library.metrics.SparseCategoricalCrossentropy(ignore_class=0), np.array(
            [0, 1], "int32"), np.array([[0.5, 0.5], [0.5, 0.5]], "float32"))),
    Difference(
        "metrics", "counts at thresholds, `AUC`, `IoU`",
        "Weights `(n, 1)` for predictions `(n,)`, `(n,)` for `(n, t)`, or `(n, k)` with `class_id` fail.",
        "They are matched, rows first.", "As for losses.",
        lambda library: _metric(library.metrics.Precision(), np.array([0, 1], "int32"),
                                np.array([0.6, 0.7], "float32"), sample_weight=np.ones((2, 1), "float32"))),
    Difference(
        "metrics", "`FBetaScore`, `F1Score`",
        "Weights `(n, 1)` or `(n, k)` are repeated along a new axis: counts are wrong, or it fails.",
        "They are those of rows, or of values.", "As for losses.",
        lambda library: _metric(library.metrics.FBetaScore("micro", threshold=0.5), np.array([[0, 1], [1, 1]], "int32"),
                                np.array([[0.6, 0.3], [0.8, 0.9]], "float32"),
                                sample_weight=np.array([[1.0], [3.0]], "float32"))),
    Difference(
        "metrics", "`FBetaScore`, `F1Score`", "`beta=2` and `threshold=1` are refused, as they are no floats.",
        "They are numbers.", "Nothing is gained by refusing them.",
        lambda library: _metric(library.metrics.FBetaScore(beta=2), np.array([[0, 1]], "int32"),
                                np.array([[0.2, 0.8]], "float32"))),
    Difference(
        "metrics", "`BinaryCrossentropy`", "Labels `(n,)` and predictions `(n, 1)` fail.",
        "Their ranks are matched, as losses do.", "A model that trains must have its metric too.",
        lambda library: _metric(library.metrics.BinaryCrossentropy(), np.array([0.0, 1.0], "float32"),
                                np.array([[0.2], [0.7]], "float32"))),
    Difference(
        "metrics", "`PearsonCorrelation`, `ConcordanceCorrelation`", "Constant labels or predictions give NaN.",
        "They give 0.", "One such row would make the result of an epoch NaN.",
        lambda library: _metric(library.metrics.PearsonCorrelation(), np.ones((2, 3), "float32"), _reals(2, 3))),
    Difference(
        "metrics", "`R2Score`", "Weights that are all 0, or all but one, give NaN.", "They give 0.",
        "As all other metrics do.",
        lambda library: _metric(library.metrics.R2Score(), _reals(4, 1), _reals(4, 1) ** 2,
                                sample_weight=np.zeros(4, "float32"))),
    Difference(
        "metrics", "`R2Score(num_regressors=...)`", "Rows of weight 0 are counted as samples.", "They are not.",
        "As if they were absent, as in all other metrics.",
        lambda library: _metric(library.metrics.R2Score(num_regressors=1), _reals(6, 1), _reals(6, 1) ** 2,
                                sample_weight=np.array([1, 1, 1, 1, 0, 0], "float32"))),
    Difference(
        "metrics", "`IoU`, `MeanIoU`, `BinaryIoU`, `OneHotIoU`, `OneHotMeanIoU`",
        "The confusion matrix is int32 by default: fractions of weights are cut off.", "It is float32.",
        "Weights count as they are.",
        lambda library: _metric(library.metrics.MeanIoU(num_classes=2), np.array([0, 1], "int32"),
                                np.array([0, 0], "int32"), sample_weight=np.array([0.5, 1.5], "float32"))),
    Difference(
        "metrics", "`CategoricalCrossentropy(axis=..., label_smoothing=...)`",
        "The smoothing is spread over as many classes as the last axis has.", "Over those of `axis`.", "As for losses.",
        lambda library: _metric(library.metrics.CategoricalCrossentropy(axis=1, label_smoothing=0.3), np.array(
            [[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], "float32"), np.full((1, 3, 2), 1 / 3, "float32"))),
    Difference(
        "metrics", "`SparseCategoricalAccuracy`, `Accuracy`, `CosineSimilarity` and others",
        "Labels whose shape does not fit are broadcast.", "ValueError.", "As for losses.",
        lambda library: _metric(library.metrics.Accuracy(), np.zeros((4, 1), "float32"), np.zeros((4, 3), "float32"))),
    Difference(
        "metrics", "`Precision(class_id=...)`, `Precision(top_k=...)` and others",
        "A class that the predictions do not have is taken for the last one.", "ValueError.",
        "The numbers would be those of another class.",
        lambda library: _metric(library.metrics.Precision(class_id=7), np.array([[0, 1]], "int32"),
                                np.array([[0.2, 0.8]], "float32"))),
    Difference(
        "metrics", "`get_config` of `CosineSimilarity`, `SparseTopKCategoricalAccuracy` and others",
        "Lacks `axis` and `from_sorted_ids`.", "Has them.", "A configuration is to make an equal metric.",
        lambda library: _metric(
            library.metrics.CosineSimilarity.from_config(library.metrics.CosineSimilarity(axis=0).get_config()),
            _reals(2, 3), _reals(2, 3) ** 2)),
    Difference(
        "metrics", "`metrics.get(function)`", "Returns the function.", "Returns its mean over rows, a `Metric`.",
        "All that `get` returns can be updated.",
        lambda library: type(library.metrics.get(library.losses.huber)).__name__ == "function"),
    Difference(
        "optimizers", "`use_ema=True`", "The optimizer keeps averages of the weights, which replace them after `fit`.",
        "ValueError, which names `compile(ema_decay=...)`: `evaluate` and `predict` then use the averages.",
        "Training can go on from the weights themselves.",
        lambda library: library.optimizers.SGD(use_ema=True).learning_rate),
    Difference(
        "optimizers", "`loss_scale_factor`", "The loss is multiplied by it, and gradients are divided.",
        "ValueError, which names `compile(precision=\"mixed_float16\")`.", "The scale belongs to the precision.",
        lambda library: library.optimizers.SGD(loss_scale_factor=2.0).learning_rate),
    Difference(
        "optimizers", "`learning_rate`", "Must be a float: `SGD(1)` is refused.", "May be a whole number.",
        "Nothing is gained by refusing it.", lambda library: library.optimizers.SGD(1).learning_rate),
    Difference(
        "optimizers", "`optimizer.learning_rate = ...`", "Refused if the rate is a schedule.",
        "Scales the rest of the schedule.", "`ReduceLROnPlateau` and schedules work together.",
        lambda library: _set_rate(library)),
    Difference(
        "optimizers", "all", "Rates, clips and decays outside of their ranges pass, such as `beta_1=2.0`.",
        "ValueError.", "Mistakes are to be seen before anything is trained.",
        lambda library: library.optimizers.Adam(beta_1=2.0).learning_rate),
    Difference(
        "optimizers", "`Ftrl`", "A rate of 0 gives NaN.", "A rate of 0 changes nothing.", "As of all other optimizers.",
        lambda library: _ftrl_at_rate_zero(library)),
    Difference(
        "optimizers", "`LossScaleOptimizer`", "Scales the loss in any precision.",
        "Needs `precision=\"mixed_float16\"`, and the scale stays between 2**-15 and 2**100.",
        "At a scale of 0 or infinity, nothing is trained any more.",
        lambda library: hasattr(library.optimizers.LossScaleOptimizer(library.optimizers.SGD()), "scale_loss")),
    Difference(
        "optimizers", "`MultiOptimizer`, `OptimizerMap`", "Different optimizers for different variables.",
        "`compile(optimizer={\"encoder\": ..., \"decoder\": ...})` for a dict of modules, or `optax.partition`.",
        "Names of modules say it.", lambda library: hasattr(library.optimizers, "MultiOptimizer")),
    Difference(
        "optimizers", "`name`", "Snake case, numbered: `rm_sprop`, `adam_w_1`.",
        "The class's in lower case: `rmsprop`.", "The name that `compile(\"rmsprop\")` takes.",
        lambda library: library.optimizers.RMSprop().name == "rmsprop"),
    Difference(
        "regularizers", "`OrthogonalRegularizer`", "The penalty of a single vector is NaN.", "It is 0.",
        "It has no pair that could be orthogonal.",
        lambda library: library.regularizers.OrthogonalRegularizer()(jnp.ones((1, 2)))),
    Difference(
        "utils", "`array_to_img`, `save_img`", "With `scale=False`, values outside of [0, 255] wrap around.",
        "ValueError.", "It would be another picture.",
        lambda library: np.asarray(library.utils.array_to_img(np.full((1, 1, 3), 300), scale=False))),
    Difference(
        "utils", "`load_img`", "Grey images of 16 bits are cut off at 255 where they become colours.",
        "ValueError, which says how to load them.", "Most of them would be white.",
        lambda library: np.asarray(library.utils.load_img(io.BytesIO(_grey_of_16_bits())))),
    Difference(
        "utils", "`save_img`", "JPEG drops the transparency of four channels, with a warning.", "ValueError.",
        "What is written should be what is given.",
        lambda library: library.utils.save_img(io.BytesIO(), np.zeros((1, 1, 4)), file_format="jpeg")),
)


def _grey_of_16_bits() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((1, 1), 1000, np.uint16)).save(file, "png")
    return file.getvalue()


def _set_rate(library: Any) -> Any:
    optimizer = library.optimizers.SGD(library.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    optimizer.learning_rate = 0.5
    return optimizer.learning_rate


def _ftrl_at_rate_zero(library: Any) -> Any:
    optimizer, weights, grads = library.optimizers.Ftrl(0.0), np.ones(2, "float32"), np.ones(2, "float32")
    if hasattr(optimizer, "init"):
        return weights + optimizer.update(grads, optimizer.init(weights), weights)[0]
    variable = library.Variable(weights)
    optimizer.build([variable])
    optimizer.apply([grads], [variable])
    return np.asarray(variable)
