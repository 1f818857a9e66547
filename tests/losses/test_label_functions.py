"""Functions given as losses and metrics take labels first: another order is refused before training."""

import functools

import optax
import pytest
from flax import linen as nn

import trainer
from trainer.losses.label_functions import check_takes_labels_first

REVERSED = {
    "optax": optax.softmax_cross_entropy, "optax, labels": optax.softmax_cross_entropy_with_integer_labels,
    "optax, binary": optax.sigmoid_binary_cross_entropy, "torch": lambda pred, target: pred - target,
    "hat": lambda y_hat, y: y_hat - y, "outputs": lambda outputs, labels: outputs,
    "partial": functools.partial(lambda alpha, logits, labels: logits, 0.5)}
RIGHT = {
    "names": lambda y_true, y_pred: y_pred, "short": lambda y, p: p, "labels": lambda labels, logits: logits,
    "weights": lambda y_true, y_pred, sample_weight=None: y_pred, "symmetric": optax.l2_loss, "unknown": lambda a, b: b,
    "any": lambda *arguments: arguments[1], "huber": optax.huber_loss, "builtin": max,
    "alone": lambda pred, target_weights: pred}
OTHER_NUMBERS = {"none": lambda: 0, "one": lambda p: p, "three": lambda params, x, y: x}


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_predictions_before_labels_are_refused(kind):
    for function in REVERSED.values():
        with pytest.raises(ValueError, match=rf"A {kind} is called with \(y_true, y_pred\)\. .*takes predict"):
            check_takes_labels_first(kind, function)
    for function in RIGHT.values():
        check_takes_labels_first(kind, function)


@pytest.mark.parametrize("function", OTHER_NUMBERS.values(), ids=OTHER_NUMBERS)
def test_other_numbers_of_arguments_are_refused(function):
    with pytest.raises(TypeError, match=r"A loss is a function of \(y_true, y_pred\), or .*Received: <lambda>\("):
        check_takes_labels_first("loss", function)


@pytest.mark.parametrize("arguments", [
    {"loss": optax.softmax_cross_entropy}, {"loss": "mse", "metrics": [lambda preds, labels: preds]},
    {"loss": "mse", "weighted_metrics": [optax.sigmoid_binary_cross_entropy]}])
def test_compile_refuses_them(arguments):
    model = trainer.Model(nn.Dense(3))
    with pytest.raises(ValueError, match=r"is called with \(y_true, y_pred\)"):
        model.compile("adam", **arguments)
