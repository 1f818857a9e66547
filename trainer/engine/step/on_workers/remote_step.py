"""A train step on a worker, which pulls parameters and pushes gradients to the parameter servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.arrays import HostArrays, as_batch
from trainer.data.sources.groups import BatchSpec
from trainer.distribute.parameter_server.per_worker import WorkerIterator
from trainer.distribute.parameter_server.push_context import PushContext
from trainer.distribute.parameter_server.rows.rows_function import RowsFunction
from trainer.distribute.parameter_server.rows.served_rows import plain
from trainer.distribute.parameter_server.served_model import ModelClient, without_opt_state
from trainer.engine.step import steps


def outcome_of_step(
    user_step: steps.Step, shapes: TrainState, params: PyTree, moving: tuple[Any, Any, Any], batch: PyTree
) -> tuple[Any, ...]:
    """Returns the gradients, loss, model state, logs and rows of a step; `moving` is step, model state and seed."""
    contexts: list[PushContext] = []

    def make_context(rows: int) -> PushContext:
        contexts.append(PushContext(rows))
        return contexts[0]

    step, model_state, seed = moving
    state = without_opt_state(shapes.replace(step=step, params=params, model_state=model_state, seed=seed))
    left, logs, rows = steps.train_one_batch(user_step, make_context, state, batch)
    grads = plain(contexts[0].grads or {})
    return grads, contexts[0].value, left.model_state, logs, jnp.asarray(rows, jnp.float32)


class RemoteStep:
    """A model's train step, which each worker compiles once.

    Args:
      user_step: the model's `train_step`.
      shapes: the shapes of the state.
      tables: the paths of parameters of which it pulls only the rows that it looks up.
      spec: the chief's batch spec, which batches read by the worker must match.
      check_labels: raises for targets in such batches that the loss or a metric cannot take.
    """

    def __init__(self, user_step: steps.Step, shapes: TrainState, tables: Collection[str], spec: BatchSpec,
                 check_labels: Callable[[Any, Any], None]):
        self._user_step, self._shapes, self._tables = user_step, shapes, tables
        self._spec, self._check_labels = spec, check_labels

    def read(self, iterator: WorkerIterator) -> Any:
        """Returns the next batch of the worker's own data; raises DataError or ValueError if it is invalid."""
        batch = as_batch(next(iterator))
        self._spec.check(batch)
        self._check_labels(*unpack_x_y_sample_weight(batch)[1:])
        return batch

    @functools.cached_property
    def _compiled(self) -> RowsFunction:
        return RowsFunction(functools.partial(outcome_of_step, self._user_step, self._shapes), self._shapes.params,
                            self._tables)

    def shapes_of_logs(self, batch: PyTree) -> Any:
        """Returns the shapes of a step's logs; raises ValueError if the step cannot run on a worker."""
        shapes = self._shapes
        return self._compiled.shapes(shapes.params, (shapes.step, shapes.model_state, shapes.seed), batch)[3]

    def __call__(self, client: ModelClient, number: int, batch: PyTree) -> tuple[list[np.ndarray], Any, int]:
        """Makes a step; returns the leaves of its logs, its rows, and the largest staleness of its gradients."""
        state = client.pull()
        moving = np.int32(client.first_step + number), state.model_state, state.seed
        outcome, numbers = self._compiled(client.pull_rows, state.params, moving, batch)
        grads, value, model_state, logs, rows = outcome
        staleness = client.push(number, grads, value, model_state, numbers)
        return jax.tree.leaves(logs), rows, staleness


def train_on_batch(
    step: RemoteStep, client: ModelClient, number: int, batch: PyTree, arrays: HostArrays | WorkerIterator | None
) -> Any:
    """Makes a step, in a worker.

    Args:
      client: pulls and pushes.
      number: the index of the step.
      batch: the batch, or its row indices in `arrays`.
      arrays: the data, if the worker has them; or the worker's own iterator, which yields the batch.
    """
    if isinstance(arrays, WorkerIterator):
        batch = step.read(arrays)
    elif arrays is not None:
        batch = jax.tree.map(lambda leaf: leaf[0], arrays.gather(batch[None]))
    return step(client, number, batch)
