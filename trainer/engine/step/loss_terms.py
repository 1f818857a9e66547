"""The loss over several batches that are not weighted by their rows.

A mean with sample weights divides by their sum, and a loss with a mask by the number of kept values. Over batches, such
a loss is the sum of all totals divided by the sum of all divisors, as for a single batch of all rows. Keras reports the
mean of batch losses, weighted by rows. Training does so here too, because the weights change and no number is the loss
of all rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.core.ambient import state
from trainer.core.replica_context import divide_sum, get_replica_context
from trainer.metrics import Metric
from trainer.metrics.base import MetricValue


class WeightedLossTerm(NamedTuple):
    """The sums of the loss of an output over the rows of the context.

    Attributes:
      name: the output's name; None for a single output.
      factor: its entry of `loss_weights`.
      total: the sum over these rows.
      divisor: the divisor of such a sum.
    """

    name: str | None
    factor: float
    total: jax.Array
    divisor: jax.Array


@contextlib.contextmanager
def recorded() -> Iterator[list[WeightedLossTerm]]:
    """Yields a list that collects the terms of losses in the block whose divisor is not the number of rows."""
    terms: list[WeightedLossTerm] = []
    with state.replaced(loss_terms=terms):
        yield terms


def record(term: WeightedLossTerm) -> None:
    """Adds a term to the list of the current recording, if any."""
    terms = state.current().loss_terms
    if terms is not None:
        terms.append(term)


def exact_over_batches(
    logs: Mapping[str, Any], terms: list[WeightedLossTerm], terms_of_outputs: list[WeightedLossTerm]
) -> dict[str, Any]:
    """Returns logs of a step, with the loss and the losses of single outputs as sums that add up over batches.

    Args:
      logs: the logs, with the loss as "loss".
      terms: the list of `recorded` during the computation of the loss.
      terms_of_outputs: the list of `recorded` during the computation of the losses of single outputs.
    """
    values = dict(logs)
    if terms:
        context = get_replica_context()
        replicas = context.num_replicas_in_sync
        known = sum(term.factor * divide_sum(term.total * replicas, context.sum(term.divisor)) for term in terms)
        # Additional terms of an overridden `compute_loss` are weighted by rows.
        rows = jnp.asarray(context.global_rows, jnp.float32) / replicas
        rest = WeightedLossTerm(None, 1.0, (logs["loss"] - known) * rows, rows)
        values["loss"] = _over_batches([*terms, rest])
    for term in terms_of_outputs:
        name = f"{term.name}_loss"
        if name in values:
            values[name] = _over_batches([term._replace(factor=1.0)])
    return values


def _over_batches(terms: list[WeightedLossTerm]) -> MetricValue:
    sums = [jnp.asarray(each, jnp.float32) for term in terms for each in (term.total, term.divisor)]
    return MetricValue(sums, _sum_of_means(tuple(term.factor for term in terms)))


@functools.cache
def _sum_of_means(factors: tuple[float, ...]) -> Metric:
    return _SumOfMeans(factors)


class _SumOfMeans(Metric):
    """A sum of factors times means, where each mean is a sum divided by a sum."""

    def __init__(self, factors: tuple[float, ...]):
        super().__init__(name="loss")
        self.factors = factors
        self.sums = [(self.add_variable(name="total"), self.add_variable(name="divisor")) for _ in factors]

    def result(self) -> jax.Array:
        means = (divide_sum(total.value, divisor.value) for total, divisor in self.sums)
        return jnp.asarray(sum(factor * mean for factor, mean in zip(self.factors, means, strict=True)))
