"""The check that a function given as a loss or a metric takes labels first, and then predictions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_MODULES = {"loss": "losses", "metric": "metrics"}
_PREDICTIONS = re.compile(r"(y_?)?(pred|preds|predictions?|predicted|hat|outputs?|logits?|probs?|probabilities)")
_LABELS = re.compile(r"y|(y_?)?(true|labels?|targets?|actual)")


def check_takes_labels_first(kind: str, function: Callable[..., Any]) -> None:
    """Raises an error before training for a function that cannot be called with labels and predictions, in this order.

    Args:
      kind: "loss" or "metric".
      function: the user's function. Python must know its signature, else nothing is checked.

    Raises:
      TypeError: if it does not take two arguments.
      ValueError: if the names of its parameters say that it takes predictions first, as optax's losses of classes do.
        Its losses of numbers, such as `optax.l2_loss(predictions, targets)`, are symmetric.

    >>> check_takes_labels_first("loss", lambda logits, labels: logits)
    Traceback (most recent call last):
    ...
    ValueError: A loss is called with (y_true, y_pred). Received: <lambda>(logits, labels), which takes predictions \
first. Give `lambda y_true, y_pred: function(y_pred, y_true)`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    received = f"Received: {getattr(function, '__name__', type(function).__name__)}{signature}"
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(f"A {kind} is a function of (y_true, y_pred), or an object of `trainer.{_MODULES[kind]}`. "
                        f"{received}. Where a loss needs more, override `Model.compute_loss`.") from None
    first, second, *_ = [*signature.parameters, "", ""]
    is_symmetric = str(getattr(function, "__module__", "")).startswith("optax.") and first == "predictions"
    if _PREDICTIONS.fullmatch(first) and _LABELS.fullmatch(second) and not is_symmetric:
        raise ValueError(f"A {kind} is called with (y_true, y_pred). {received}, which takes predictions first. Give "
                         "`lambda y_true, y_pred: function(y_pred, y_true)`.")
