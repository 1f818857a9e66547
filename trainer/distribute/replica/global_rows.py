"""A function of the rows of all replicas, in a step that has those of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from trainer.core import replica_context
from trainer.core.replica_context import ReplicaContext, get_replica_context

Function = TypeVar("Function", bound=Callable[..., Any])


def on_global_batch(function: Function) -> Function:
    """Returns a function that is called with the rows of the whole batch, on each replica.

    It is for losses over pairs of rows, such as contrastive losses, which need all rows of a batch: arrays among the
    arguments that have this replica's rows are gathered from all of them. What the function returns is the same on all
    replicas, so a loss is that of the whole batch, and so are its gradients. Each replica computes it whole.

    Args:
      function: such as an overridden `compute_loss`.

    Raises:
      ValueError: when called, in a batch whose rows do not divide by the replicas.

    Example:
      >>> class Contrastive(trainer.Model):  # doctest: +SKIP
      ...     @trainer.distribute.on_global_batch
      ...     def compute_loss(self, x, y, y_pred, sample_weight):
      ...         similarity = y_pred @ y_pred.T
      ...         labels = jnp.arange(len(similarity))
      ...         return optax.softmax_cross_entropy_with_integer_labels(similarity, labels).mean()
    """
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        if context.is_padded:
            raise ValueError(
                f"`{function.__name__}` needs the whole batch, of which some rows are padding: they do not divide by "
                "the replicas, and are too many for one. Leave such a batch out "
                "(`Dataset.batch(..., drop_remainder=True)`), or choose a batch size that leaves none.")
        if context.num_replicas_in_sync == 1:
            return function(*args, **kwargs)

        def gathered(leaf: Any) -> Any:
            has_rows = isinstance(leaf, (jax.Array, np.ndarray)) and leaf.shape[:1] == (context.rows,)
            return context.all_gather(leaf) if has_rows else leaf

        args, kwargs = jax.tree.map(gathered, (args, kwargs))
        rows = None if context.rows is None else context.rows * context.num_replicas_in_sync
        with replica_context.enter(ReplicaContext(rows)):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
