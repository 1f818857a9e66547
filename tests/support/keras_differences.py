"""All intended differences from Keras 3: of losses, metrics, optimizers, schedules, penalties, images, callbacks, data.

`tests/reference/make_keras_differences.py` writes docs/keras_differences.md from this table, and
`tests/project/test_keras_differences.py` checks that each example still differs, and that the page is up to date.
"""

from __future__ import annotations

import io
import os
import tempfile
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Difference(NamedTuple):
    """One difference.

    Attributes:
      room: "losses", "metrics", "optimizers", "regularizers", "precision", "utils", "callbacks", "data" or
        "preprocessing".
      names: the names concerned, in Markdown.
      keras: behaviour of Keras.
      ours: behaviour of the trainer.
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
        "losses", "all losses",
        "For values of shape `(n, t)`, weights of shape `(n,)` fail, or are applied to the wrong axis.",
        "The weight of a row applies to all of its values.", "`sample_weight` of `fit` has a number for each row.",
        lambda library: library.losses.MeanSquaredError()(
            _reals(4, 2, 3), np.zeros((4, 2, 3), "float32"), sample_weight=_reals(4))),
    Difference(
        "losses", "all losses", "The loss of no rows is an empty array, or NaN.", "The loss of no rows is 0.",
        "In a custom loop, a replica may have no rows of the last batch.",
        lambda library: library.losses.MeanSquaredError()(np.zeros((0, 3), "float32"), np.zeros((0, 3), "float32"))),
    Difference(
        "losses", "all losses", "Values of shape `(n,)` are the features of a single sample, with one loss.",
        "Values of shape `(n,)` are `n` samples, each with a loss.", "The rows can have weights.",
        lambda library: library.losses.BinaryCrossentropy(reduction="sum")(
            np.array([0.0, 1.0], "float32"), np.array([0.2, 0.7], "float32"))),
    Difference(
        "losses", "all losses, with `reduction=None`",
        "With weights of shape `(n, 1)`, the losses have the shape `(n, 1)`.",
        "With weights of shape `(n, 1)`, the losses have the shape `(n,)`.", "Weights change values, not shapes.",
        lambda library: library.losses.MeanSquaredError(reduction=None)(
            _reals(4, 3), np.zeros((4, 3), "float32"), sample_weight=_reals(4, 1))),
    Difference(
        "losses", "all losses, of a single row",
        "The reduction `mean_with_sample_weight` does not divide by a scalar weight.",
        "The reduction divides by the weight, as for more rows.", "The last batch of an epoch may be a single row.",
        lambda library: library.losses.MeanSquaredError(reduction="mean_with_sample_weight")(
            _reals(1, 3), np.zeros((1, 3), "float32"), sample_weight=0.5)),
    Difference(
        "losses", "all losses", "Labels `(n, 1)` and predictions `(n, k)` are broadcast.",
        "Labels `(n, 1)` and predictions `(n, k)` raise ValueError.",
        "Such shapes are nearly always a mistake, and would train another function silently.",
        lambda library: library.losses.MeanSquaredError()(_reals(4, 1), _reals(4, 3))),
    Difference(
        "losses", "all losses, with `dtype=\"float16\"` or `\"bfloat16\"`",
        "Losses are computed in this dtype, which rounds 1 - 1e-7 to 1.",
        "Losses are computed in float32; the result has the dtype.", "The loss of a confident mistake must be finite.",
        lambda library: library.losses.BinaryCrossentropy(dtype="float16")(
            np.array([[1.0], [0.0]], "float32"), np.array([[0.0], [1.0]], "float32"))),
    Difference(
        "losses", "all losses and metrics, with `dtype=\"mixed_float16\"` or another policy",
        "A policy is accepted, and its compute dtype is used.", "A policy raises TypeError; `dtype` takes dtypes only.",
        "Policies belong to `compile(precision=...)`.",
        lambda library: str(library.losses.MeanSquaredError(dtype="mixed_float16").dtype)),
    Difference(
        "losses", "all losses, with masks", "Values are left out by the mask that Keras's layers set on predictions.",
        "Masks are not read; pass `sample_weight`.", "Flax's layers set no masks.",
        lambda library: _masked(library)),
    Difference(
        "losses", "`BinaryCrossentropy`, `Huber` and others",
        "Values such as `label_smoothing=2.0` or `delta=-1.0` are accepted.", "Such values raise ValueError.",
        "Mistakes should be found before the training.",
        lambda library: library.losses.Huber(delta=-1.0)(_reals(2, 1), _reals(2, 1)) * 0),
    Difference(
        "losses", "`BinaryFocalCrossentropy(from_logits=True)`",
        "Logits are converted to probabilities and clipped to [1e-7, 1 - 1e-7]: for logits beyond about ±16, the "
        "gradient is 0.", "The loss is computed from the logits.", "Confident mistakes must have a gradient.",
        lambda library: library.losses.BinaryFocalCrossentropy(from_logits=True)(
            np.zeros((1, 1), "float32"), np.full((1, 1), 50.0, "float32"))),
    Difference(
        "losses", "`CategoricalCrossentropy(axis=..., label_smoothing=...)`",
        "The number of classes for the smoothing is the length of the last axis.",
        "The number of classes for the smoothing is the length of `axis`.", "Smoothed labels must sum to 1.",
        lambda library: library.losses.CategoricalCrossentropy(axis=1, label_smoothing=0.3)(
            np.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], "float32"), np.full((1, 3, 2), 1 / 3, "float32"))),
    Difference(
        "losses", "`CategoricalCrossentropy`", "The loss of a single class is 0, with a warning.",
        "A single class raises ValueError.", "The model would not be trained.",
        lambda library: library.losses.CategoricalCrossentropy(from_logits=True)(
            np.ones((2, 1), "float32"), np.ones((2, 1), "float32")) * 0),
    Difference(
        "losses", "`SparseCategoricalCrossentropy`", "Labels of a float dtype are accepted.",
        "Labels of a float dtype raise ValueError.",
        "Such labels are probably one-hot labels, or targets of a regression.",
        lambda library: library.losses.SparseCategoricalCrossentropy()(
            np.array([0.0, 1.0], "float32"), np.array([[0.2, 0.8], [0.5, 0.5]], "float32"))),
    Difference(
        "losses", "`SparseCategoricalCrossentropy(axis=...)`", "An axis other than the last fails.",
        "Every axis is supported.", "Images may have their channels first.",
        lambda library: library.losses.SparseCategoricalCrossentropy(axis=1)(
            np.array([[0, 1]], "int32"), np.full((1, 3, 2), 1 / 3, "float32"))),
    Difference(
        "losses", "`CategoricalGeneralizedCrossEntropy`",
        "Each label of shape `(n, 1)` is compared with the predictions of all rows.",
        "Each label is compared with the predictions of its row.", "A mean over wrong pairs is not the loss.",
        lambda library: library.losses.CategoricalGeneralizedCrossEntropy()(
            np.array([[0], [1]], "int32"), np.array([[0.2, 0.8], [0.9, 0.1]], "float32"))),
    Difference(
        "losses", "`get_config` of `Huber`, `CosineSimilarity`, `SparseCategoricalCrossentropy`",
        "The configuration lacks `delta` and `axis`, so `from_config` makes a loss with the defaults.",
        "The configuration has these arguments.", "`from_config` must make an equal loss.",
        lambda library: library.losses.Huber.from_config(library.losses.Huber(delta=0.1).get_config())(
            np.zeros((1, 1), "float32"), np.ones((1, 1), "float32"))),
    Difference(
        "losses", "`losses.get`, `metrics.get`, and the arguments of losses and metrics",
        "A value of a wrong type raises ValueError.", "A value of a wrong type raises TypeError.",
        "Python's own functions behave like this.",
        lambda library: library.losses.get(3)),
    Difference(
        "losses", "`BinaryCrossentropy`, `BinaryFocalCrossentropy`, `SparseCategoricalCrossentropy`, in `compile`",
        "Labels outside of [0, 1], or outside of the classes, are accepted: the loss falls without end, or is 0 or "
        "NaN.", "Such labels raise ValueError, unless their weight is 0.",
        "Such labels are probably -1 and 1, or numbered from 1.",
        lambda library: _trained(library, "binary_crossentropy", np.array([[-1.0], [1.0]], "float32"))),
    Difference(
        "losses", "subclasses of `Loss`", "`call` receives integer labels as floats: 16777217 becomes 16777216.",
        "`call` receives integer labels as integers.", "Ids stay exact, and class indices can be used as indices.",
        lambda library: _own_loss(library)(np.array([2**24 + 1], "int32"), np.zeros(1, "float32"))),
    Difference(
        "losses", "`class_weight` of `fit`",
        "A target that is not a class, such as 1.37, has the weight of the nearest class.",
        "Such a target raises ValueError, unless it is between 0 and 1; then it is rounded.",
        "The targets of a regression have no class weights.",
        lambda library: _weighted(library, [1.37, 2.0])),
    Difference(
        "metrics", "all metrics that are means", "A scalar weight counts once for each batch.",
        "A scalar weight counts once for each row.", "The result should not depend on the batch size.",
        lambda library: _over_batches(library.metrics.Mean(), {"sample_weight": 1.0}, {"sample_weight": 1.0})),
    Difference(
        "metrics", "all metrics", "Accumulators have the metric's dtype: float16 stops counting at 2048.",
        "Accumulators are float32; the result has the dtype.", "Sums over an epoch must stay exact.",
        lambda library: _sum_of(library.metrics.Sum(dtype="float16"), 2048.0, 1.0, 1.0)),
    Difference(
        "metrics", "`SparseCategoricalCrossentropy(ignore_class=...)`",
        "Without weights, ignored samples count as 0; with weights, they do not count.", "Ignored samples never count.",
        "Weights of 1 should not change the mean.",
        lambda library: _metric(library.metrics.SparseCategoricalCrossentropy(ignore_class=0), np.array(
            [0, 1], "int32"), np.array([[0.5, 0.5], [0.5, 0.5]], "float32"))),
    Difference(
        "metrics", "counts at thresholds, `AUC`, `IoU`",
        "Weights `(n, 1)` for predictions `(n,)`, `(n,)` for `(n, t)`, or `(n, k)` with `class_id` fail.",
        "The first dimension of weights is matched with the rows of predictions.", "Losses behave like this.",
        lambda library: _metric(library.metrics.Precision(), np.array([0, 1], "int32"),
                                np.array([0.6, 0.7], "float32"), sample_weight=np.ones((2, 1), "float32"))),
    Difference(
        "metrics", "`FBetaScore`, `F1Score`",
        "Weights `(n, 1)` or `(n, k)` are repeated along a new axis: the counts are wrong, or the metric fails.",
        "Weights `(n, 1)` belong to rows, weights `(n, k)` to values.", "Losses behave like this.",
        lambda library: _metric(library.metrics.FBetaScore("micro", threshold=0.5), np.array([[0, 1], [1, 1]], "int32"),
                                np.array([[0.6, 0.3], [0.8, 0.9]], "float32"),
                                sample_weight=np.array([[1.0], [3.0]], "float32"))),
    Difference(
        "metrics", "`FBetaScore`, `F1Score`", "`beta=2` and `threshold=1` are refused, because they are not floats.",
        "`beta` and `threshold` may be whole numbers.", "Whole numbers are no mistake.",
        lambda library: _metric(library.metrics.FBetaScore(beta=2), np.array([[0, 1]], "int32"),
                                np.array([[0.2, 0.8]], "float32"))),
    Difference(
        "metrics", "`BinaryCrossentropy`", "Labels `(n,)` and predictions `(n, 1)` fail.",
        "Labels `(n,)` and predictions `(n, 1)` are matched, as in losses.",
        "A loss and its metric should accept the same shapes.",
        lambda library: _metric(library.metrics.BinaryCrossentropy(), np.array([0.0, 1.0], "float32"),
                                np.array([[0.2], [0.7]], "float32"))),
    Difference(
        "metrics", "`PearsonCorrelation`, `ConcordanceCorrelation`", "Constant labels or predictions give NaN.",
        "Constant labels or predictions give 0.", "A single such row would make the result of an epoch NaN.",
        lambda library: _metric(library.metrics.PearsonCorrelation(), np.ones((2, 3), "float32"), _reals(2, 3))),
    Difference(
        "metrics", "`R2Score`", "Weights with fewer than two positive values give NaN.",
        "Weights with fewer than two positive values give 0.", "Other metrics give 0 rather than NaN.",
        lambda library: _metric(library.metrics.R2Score(), _reals(4, 1), _reals(4, 1) ** 2,
                                sample_weight=np.zeros(4, "float32"))),
    Difference(
        "metrics", "`R2Score(num_regressors=...)`", "Rows of weight 0 count as samples.",
        "Rows of weight 0 do not count.", "In all other metrics, rows of weight 0 do not count.",
        lambda library: _metric(library.metrics.R2Score(num_regressors=1), _reals(6, 1), _reals(6, 1) ** 2,
                                sample_weight=np.array([1, 1, 1, 1, 0, 0], "float32"))),
    Difference(
        "metrics", "`IoU`, `MeanIoU`, `BinaryIoU`, `OneHotIoU`, `OneHotMeanIoU`",
        "The confusion matrix is int32 by default: fractions of weights are lost.",
        "The confusion matrix is float32 by default.", "Weights may be fractions.",
        lambda library: _metric(library.metrics.MeanIoU(num_classes=2), np.array([0, 1], "int32"),
                                np.array([0, 0], "int32"), sample_weight=np.array([0.5, 1.5], "float32"))),
    Difference(
        "metrics", "`CategoricalCrossentropy(axis=..., label_smoothing=...)`",
        "The number of classes for the smoothing is the length of the last axis.",
        "The number of classes for the smoothing is the length of `axis`.", "Losses behave like this.",
        lambda library: _metric(library.metrics.CategoricalCrossentropy(axis=1, label_smoothing=0.3), np.array(
            [[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], "float32"), np.full((1, 3, 2), 1 / 3, "float32"))),
    Difference(
        "metrics", "`SparseCategoricalAccuracy`, `Accuracy`, `CosineSimilarity` and others",
        "Labels of a shape that does not fit are broadcast.", "Such labels raise ValueError.",
        "Losses behave like this.",
        lambda library: _metric(library.metrics.Accuracy(), np.zeros((4, 1), "float32"), np.zeros((4, 3), "float32"))),
    Difference(
        "metrics", "`Precision(class_id=...)`, `Precision(top_k=...)` and others",
        "A class beyond the predictions counts as the last class.", "Such a class raises ValueError.",
        "The result would belong to another class.",
        lambda library: _metric(library.metrics.Precision(class_id=7), np.array([[0, 1]], "int32"),
                                np.array([[0.2, 0.8]], "float32"))),
    Difference(
        "metrics", "`get_config` of `CosineSimilarity`, `SparseTopKCategoricalAccuracy` and others",
        "The configuration lacks `axis` and `from_sorted_ids`.", "The configuration has these arguments.",
        "`from_config` must make an equal metric.",
        lambda library: _metric(
            library.metrics.CosineSimilarity.from_config(library.metrics.CosineSimilarity(axis=0).get_config()),
            _reals(2, 3), _reals(2, 3) ** 2)),
    Difference(
        "metrics", "`metrics.get(function)`", "The call returns the function.",
        "The call returns a `Metric`, the mean of the function over rows.",
        "Every return value of `get` should have `update_state`.",
        lambda library: type(library.metrics.get(library.losses.huber)).__name__ == "function"),
    Difference(
        "metrics", "`SparseCategoricalAccuracy` and others, in `compile`",
        "Labels of the class that the loss ignores (`ignore_class`) count, mostly as mistakes.",
        "Labels of that class do not count.", "A metric should use the same labels as the loss.",
        lambda library: _accuracy(library, [0, 1, -100], ignore_class=-100)),
    Difference(
        "metrics", "accuracies, `IoU`, `AUC`, `Precision` and others, in `compile`",
        "Class indices beyond the outputs, and binary labels other than 0 and 1, count as mistakes or as another "
        "class.", "Such labels raise ValueError, unless their weight is 0 and the metric has weights.",
        "Such labels are probably numbered from 1, or -1 and 1.",
        lambda library: _accuracy(library, [1, 2, 3])),
    Difference(
        "metrics", "`SparseTopKCategoricalAccuracy`",
        "With JAX, the label -1 is the last class; other labels outside of the classes count as correct.",
        "Labels outside of the classes count as mistakes.", "No prediction can be right for such a label.",
        lambda library: _metric(library.metrics.SparseTopKCategoricalAccuracy(1), np.array([-1]), np.array(
            [[0.2, 0.8]], "float32"))),
    Difference(
        "metrics", "`Accuracy`, `BinaryAccuracy`", "With JAX, integers of 64 bits wrap around: 4294967296 equals 0.",
        "Integers of 64 bits are compared as floats.", "Different numbers should not be equal.",
        lambda library: _metric(library.metrics.Accuracy(), np.array([2**32]), np.array([0]))),
    Difference(
        "optimizers", "`use_ema=True`",
        "The optimizer keeps averages of the weights, which replace the weights after `fit`.",
        "The argument raises ValueError; use `compile(ema_decay=...)`, with which `evaluate` and `predict` use the "
        "averages.", "Training can continue from the weights themselves.",
        lambda library: library.optimizers.SGD(use_ema=True).learning_rate),
    Difference(
        "optimizers", "`loss_scale_factor`", "The loss is multiplied by the factor, and gradients are divided by it.",
        "The argument raises ValueError; use `compile(precision=\"mixed_float16\")`.",
        "The scale belongs to the precision.",
        lambda library: library.optimizers.SGD(loss_scale_factor=2.0).learning_rate),
    Difference(
        "optimizers", "`learning_rate`", "The rate must be a float: `SGD(1)` is an error.",
        "The rate may be a whole number.", "Whole numbers are no mistake.",
        lambda library: library.optimizers.SGD(1).learning_rate),
    Difference(
        "optimizers", "`optimizer.learning_rate = ...`", "The assignment fails if the rate is a schedule.",
        "The assignment scales the rest of the schedule.", "`ReduceLROnPlateau` and schedules work together.",
        lambda library: _set_rate(library)),
    Difference(
        "optimizers", "`optimizer.learning_rate = schedule`", "The schedule replaces the rate.",
        "A schedule raises TypeError; assign another optimizer to `model.optimizer`.",
        "The schedule is compiled into the step.",
        lambda library: _set(library, "learning_rate", library.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))),
    Difference(
        "optimizers", "`momentum`, `clipnorm` and other arguments",
        "These arguments can be set on an existing optimizer, and change later updates.",
        "These arguments can be read; setting them raises AttributeError.", "A compiled step would not see the change.",
        lambda library: _set(library, "momentum", 0.5)),
    Difference(
        "optimizers", "`build`, `apply`, `variables`", "An optimizer holds variables, and changes them.",
        "`init` and `update` are pure functions; steps call `state.apply_gradients(grads)`.",
        "JAX compiles pure functions.", lambda library: hasattr(library.optimizers.SGD(), "apply")),
    Difference(
        "optimizers", "all optimizers", "Rates, clips and decays out of range, such as `beta_1=2.0`, are accepted.",
        "Such arguments raise ValueError.", "Mistakes should be found before the training.",
        lambda library: library.optimizers.Adam(beta_1=2.0).learning_rate),
    Difference(
        "optimizers", "`Ftrl`", "A rate of 0 gives NaN.", "A rate of 0 changes nothing.",
        "With all other optimizers, a rate of 0 changes nothing.",
        lambda library: _ftrl_at_rate_zero(library)),
    Difference(
        "optimizers", "`LossScaleOptimizer`", "The optimizer scales the loss in any precision.",
        "The optimizer needs `precision=\"mixed_float16\"`; the scale stays between 2**-15 and 2**100.",
        "A scale of 0 or infinity would end the training.",
        lambda library: hasattr(library.optimizers.LossScaleOptimizer(library.optimizers.SGD()), "scale_loss")),
    Difference(
        "optimizers", "`MultiOptimizer`, `OptimizerMap`",
        "These classes give different variables different optimizers.",
        "Use `compile(optimizer={\"encoder\": ..., \"decoder\": ...})`, by names of submodules, or `optax.partition`.",
        "Submodules already have names.",
        lambda library: hasattr(library.optimizers, "MultiOptimizer")),
    Difference(
        "optimizers", "`name`", "The name is in snake case, with a number: `rm_sprop`, `adam_w_1`.",
        "The name is the class name in lower case: `rmsprop`.", "`compile(\"rmsprop\")` takes the same name.",
        lambda library: library.optimizers.RMSprop().name == "rmsprop"),
    Difference(
        "regularizers", "`OrthogonalRegularizer`", "The penalty of a single vector is NaN.", "The penalty is 0.",
        "A single vector has no pair to be orthogonal.",
        lambda library: library.regularizers.OrthogonalRegularizer()(jnp.ones((1, 2)))),
    Difference(
        "precision", "`mixed_bfloat16` and others, with your own model class",
        "A subclass of `Model` receives float inputs that are cast to 16 bits: the id 1901 becomes 1904.",
        "The model receives the given values, and each layer casts its inputs, as in Keras's functional models.",
        "In 16 bits, ids, years and seconds become other numbers.",
        lambda library: _ids_in_16_bits(library)),
    Difference(
        "utils", "`array_to_img`, `save_img`", "With `scale=False`, values outside of [0, 255] wrap around.",
        "Such values raise ValueError.", "The saved image would be wrong.",
        lambda library: np.asarray(library.utils.array_to_img(np.full((1, 1, 3), 300), scale=False))),
    Difference(
        "utils", "`load_img`", "If a 16-bit grey image is converted to colours, values above 255 become 255.",
        "The conversion raises ValueError, which names the mode for such images.",
        "Most such images would become white.",
        lambda library: np.asarray(library.utils.load_img(io.BytesIO(_grey_of_16_bits())))),
    Difference(
        "utils", "`save_img`", "As JPEG, an image with four channels loses its transparency, with a warning.",
        "Such an image raises ValueError.", "The file must show the given image.",
        lambda library: library.utils.save_img(io.BytesIO(), np.zeros((1, 1, 4)), file_format="jpeg")),
    Difference(
        "utils", "`pad_sequences`", "With the default `dtype=\"int32\"`, fractions of values are cut.",
        "Values with fractions raise ValueError; give `dtype=\"float32\"`.", "The padded values would be others.",
        lambda library: library.utils.pad_sequences([[1.5], [2.0, 3.0]])),
    Difference(
        "optimizers", "`exclude_from_weight_decay`",
        "`var_names` are searched in the last part of a weight's path, and are missing from the configuration.",
        "`var_names` are searched in the whole path, such as `\"LayerNorm_0/scale\"`, and are in the configuration. "
        "If no weight matches, `fit` raises ValueError.",
        "Layers can be selected by name, and a copy trains like the original.",
        lambda library: _excluded_in_config(library)),
    Difference(
        "callbacks", "`ModelCheckpoint`, `OrbaxCheckpoint`",
        "If no log has the monitor of `save_best_only`, each save warns, and `ModelCheckpoint` overwrites the file "
        "with the newest weights.", "If no log has the monitor, `fit` raises ValueError before it trains.",
        "The file would not hold the best weights.",
        lambda library: _saved_without_monitor(library)),
    Difference(
        "callbacks", "`CSVLogger`",
        "With `append=True`, rows have the columns of this training, even if the file's header has others.",
        "With `append=True`, rows have the columns of the header; a log without a column raises ValueError.",
        "Values must be under their names.",
        lambda library: _appended(library)),
    Difference(
        "data", "generators and other iterables", "A batch of floats may follow a batch of integers.",
        "Such a batch raises ValueError, which gives its number.",
        "A change from integers to floats is a mistake in the pipeline.",
        lambda library: _evaluated(library, (each for each in (np.ones((2, 1), "int32"), np.ones((2, 1), "float32"))))),
    Difference(
        "data", "`train_on_batch`, `test_on_batch`", "A single number as `sample_weight` multiplies the loss.",
        "A single number raises ValueError.", "Weights belong to rows.",
        lambda library: _evaluated(library, np.ones((2, 1), "float32"), np.float32(3))),
    Difference(
        "preprocessing", "`Normalization`", "Before `adapt`, the layer returns its inputs.",
        "Before `adapt`, the layer raises ValueError.", "A forgotten `adapt` should be noticed.",
        lambda library: _layers(library).Normalization()(_reals(2, 3))),
    Difference(
        "preprocessing", "`Normalization.adapt`", "A NaN among the values makes all outputs NaN.",
        "NaN raises ValueError, with the number of NaN values.", "Missing values should be filled before.",
        lambda library: _normalized(library, np.array([[1.0], [np.nan]], "float32"))),
    Difference(
        "preprocessing", "`Normalization(axis=-1).adapt`, values `(rows,)`",
        "Each row is normalized by its own mean, so all outputs are 0.",
        "Such values raise ValueError; use `axis=None`.", "The outputs would have no information.",
        lambda library: _normalized(library, _reals(3))),
    Difference(
        "preprocessing", "`Normalization.adapt`, after the model is compiled",
        "`predict` continues with the old mean and variance; only direct calls of the layer use the new.",
        "`adapt` raises RuntimeError.", "Compiled programs have mean and variance as constants.",
        lambda library: _adapted_twice(library)),
    Difference(
        "preprocessing", "`CategoryEncoding`", "An index out of range becomes a vector of zeros.",
        "An index out of range raises ValueError, if the values are on the host.",
        "Either `num_tokens` or the column is wrong.",
        lambda library: _layers(library).CategoryEncoding(3, output_mode="one_hot")(np.array([1, 3]))),
)


def _layers(library: Any) -> Any:
    return library.layers if library.__name__ == "keras" else library.data.preprocessing


def _normalized(library: Any, values: np.ndarray) -> Any:
    layer = _layers(library).Normalization()
    layer.adapt(values)
    return layer(values)


def _adapted_twice(library: Any) -> Any:
    layer = _layers(library).Normalization()
    layer.adapt(_reals(4, 2))
    model = library.Sequential([layer])
    model.predict(_reals(4, 2), verbose=0)
    layer.adapt(2 * _reals(4, 2))
    return model.predict(_reals(4, 2), verbose=0)


def _evaluated(library: Any, x: Any, sample_weight: Any = None) -> Any:
    model = _identity(library)
    model.compile("sgd", "mse")
    if sample_weight is not None:
        return model.test_on_batch(x, 2 * x, sample_weight=sample_weight)
    return model.evaluate(((rows, 2 * rows) for rows in x), verbose=0, return_dict=True)["loss"]


def _identity(library: Any) -> Any:
    if hasattr(library, "distribute"):
        return library.Model(lambda x: x)

    class Identity(library.Model):
        def call(self, x: Any) -> Any:
            return x

    return Identity()


def _accuracy(library: Any, y: list[int], **options: Any) -> Any:
    model = _identity(library)
    model.compile(loss=library.losses.SparseCategoricalCrossentropy(**options), metrics=["accuracy"])
    return model.evaluate(np.eye(3, dtype="float32"), np.array(y), verbose=0, return_dict=True)["accuracy"]


def _trained(library: Any, loss: Any, y: Any, **options: Any) -> Any:
    model = _identity(library)
    model.compile(loss=loss)
    return model.evaluate(np.full(y.shape, 0.5, "float32"), y, verbose=0, return_dict=True, **options)["loss"]


def _own_loss(library: Any) -> Any:
    class Own(library.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return (y_true - 2**24) + 0 * y_pred

    return Own()


def _weighted(library: Any, y: list[float]) -> Any:
    model = _identity(library)
    model.compile(loss="mse")
    targets = np.array(y, "float32")[:, None]
    return model.train_on_batch(np.zeros_like(targets), targets, class_weight={1: 3.0}) * 0


def _ids_in_16_bits(library: Any) -> Any:
    ids = np.array([[1901.0], [1903.0]], "float32")
    if hasattr(library, "distribute"):
        model = library.Model(lambda x: x % 7)
        model.compile(precision="mixed_bfloat16")
        return model.predict(ids, verbose=0)

    class Days(library.Model):
        def call(self, x: Any) -> Any:
            return x % 7

    return np.asarray(Days(dtype="mixed_bfloat16")(ids)).astype("float32")


def _saved_without_monitor(library: Any) -> Any:
    saved: list[str] = []
    model = types.SimpleNamespace(save=lambda path, overwrite=True: saved.append("file"))
    callback = library.callbacks.ModelCheckpoint(
        "best.keras" if library.__name__ == "keras" else "best", "val_acc", mode="max", save_best_only=True)
    callback.set_model(model)
    callback.on_epoch_end(0, {"loss": 0.5})
    return saved


def _excluded_in_config(library: Any) -> Any:
    optimizer = library.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return sorted(optimizer.get_config())


def _appended(library: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "log.csv")
        for logs in ({"loss": 0.5, "mae": 1.0}, {"loss": 0.5}):
            logger = library.callbacks.CSVLogger(path, append=True)
            logger.on_train_begin()
            logger.on_epoch_end(0, logs)
            logger.on_train_end()
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()


def _grey_of_16_bits() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((1, 1), 1000, np.uint16)).save(file, "png")
    return file.getvalue()


def _set(library: Any, name: str, value: Any) -> bool:
    """Returns whether an attribute of an optimizer can be set."""
    try:
        setattr(library.optimizers.SGD(0.5, momentum=0.9), name, value)
    except (AttributeError, TypeError):
        return False
    return True


def _masked(library: Any) -> Any:
    predictions = jnp.ones(4)
    predictions._keras_mask = jnp.array([True, False, False, False])
    return library.losses.MeanSquaredError(reduction="sum")(np.zeros((4, 1), "float32"), predictions)


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
