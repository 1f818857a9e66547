"""Combination of several heads."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import arguments, errors
from trainer.core.types import PyTree
from trainer.estimator.heads.base import Head
from trainer.estimator.heads.metrics import HeadMetric, MeanOf
from trainer.metrics import Metric

_BETWEEN = "/"  # separates the names of head and prediction, on the device


class MultiHead(Head):
    """Several heads on one model, with the weighted sum of their losses.

    The logits of all heads are concatenated along the last axis. Labels are a dict by head name. Metrics and
    predictions come from the heads: "accuracy/<name>", plus "loss/<name>". As in TensorFlow, `predict` yields a dict
    with keys `(name, key)`.

    Args:
      heads: heads with distinct names.
      head_weights: loss weights of the heads; 1 by default.

    Raises:
      ValueError: if there are no heads, names are missing or repeated, a head has a `weight_column`, or the number of
        weights differs from the number of heads.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/MultiHead
    """

    def __init__(self, heads: Sequence[Head], head_weights: Sequence[float] | None = None):
        super().__init__()
        if isinstance(heads, Head) or not isinstance(heads, Sequence):
            raise errors.wrong_type("heads", heads, "a list of heads of `trainer.estimator`")
        if not heads:
            raise ValueError("Must specify heads. Given: []")
        for head in heads:
            if not isinstance(head, Head):
                raise errors.wrong_type("heads", head, "heads of `trainer.estimator`")
            if not head.name:
                raise ValueError(f"All given heads must have name specified. Given: {type(head).__name__}.")
            if head.weight_key is not None:
                raise ValueError("Heads of a `MultiHead` have no `weight_column`: the rows of a batch have one weight "
                                 "for all. Give `head_weights`.")
        names = [head.name for head in heads]
        if len(set(names)) < len(names):
            raise ValueError(f"All heads must have names that differ. Given: {names}.")
        if head_weights is not None and len(head_weights) != len(heads):
            raise ValueError(f"heads and head_weights must have the same size. Given: {len(heads)} and "
                             f"{len(head_weights)}.")
        for weight in head_weights or ():
            arguments.require_finite(head_weights=weight)
        self._heads = list(heads)
        self._factors = [1.0] * len(heads) if head_weights is None else [float(weight) for weight in head_weights]

    @property
    def logits_dimension(self) -> int:
        return sum(head.logits_dimension for head in self._heads)

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        parts = [head.row_losses(*self._part(number, labels, logits)) for number, head in enumerate(self._heads)]
        return sum((factor * losses for factor, losses in zip(self._factors, parts, strict=True)),
                   jnp.zeros(logits.shape[0]))

    def metrics(self) -> list[Metric]:
        found: list[Metric] = []
        for number, head in enumerate(self._heads):
            metrics = [MeanOf(head.row_losses, head.key("loss")), *head.metrics()]
            for metric in metrics:
                assert isinstance(metric, HeadMetric), "all metrics of heads are"
                metric.part = functools.partial(self._part, number)
            found += metrics
        return found

    def predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        return {f"{head.name}{_BETWEEN}{key}": value for number, head in enumerate(self._heads)
                for key, value in head.predictions(self._part(number, logits, logits)[1]).items()}

    def decoded(self, predictions: Mapping[str, np.ndarray]) -> dict[Any, Any]:
        found = {}
        for head in self._heads:
            prefix = f"{head.name}{_BETWEEN}"
            own = {name.removeprefix(prefix): value for name, value in predictions.items() if name.startswith(prefix)}
            found.update({(head.name, key): value for key, value in head.decoded(own).items()})
        return found

    def encoded_labels(self, labels: PyTree) -> Any:
        if not isinstance(labels, Mapping):
            raise ValueError("Labels of a `MultiHead` must be a dict by the names of its heads. Received: "
                             f"{errors.describe(labels)}.")
        parts = []
        for head in self._heads:
            if head.name not in labels:
                raise ValueError(f"There are no labels for the head {head.name!r}. Received: {sorted(labels)}.")
            parts.append(head.encoded_labels(labels[head.name]).astype(np.float32))
        rows = {head.name: len(part) for head, part in zip(self._heads, parts, strict=True)}
        if len(set(rows.values())) > 1:
            raise ValueError(f"The labels of all heads must have as many rows. Received: {rows}.")
        return np.concatenate(parts, axis=-1)

    @property
    def label_width(self) -> int:
        return sum(head.label_width for head in self._heads)

    def _part(self, number: int, labels: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the labels and logits of a head."""
        before, head = self._heads[:number], self._heads[number]
        first_label, first_logit = (sum(each) for each in (
            [one.label_width for one in before], [one.logits_dimension for one in before]))
        return (labels[:, first_label:first_label + head.label_width],
                logits[:, first_logit:first_logit + head.logits_dimension])
