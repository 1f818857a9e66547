"""A train step on a worker: its gradients, of parameters that it has pulled, go to the parameter servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compile.jit import compiled
from trainer.core.replica_context import RowMask
from trainer.core.train_state import TrainState
from trainer.data import HostArrays, unpack_x_y_sample_weight
from trainer.data.sources.batches import BatchSpec, as_batch
from trainer.data.sources.buffers import POOL
from trainer.distribute.parameter_server.per_worker import WorkerIterator
from trainer.distribute.parameter_server.push_context import PushContext, without_memory
from trainer.distribute.parameter_server.served_model import ModelClient
from trainer.step import steps


def outcome_of_step(user_step: steps.Step, shapes: TrainState, moving: Any, batch: Any) -> tuple[Any, ...]:
    """Returns what a step leaves: gradients, loss, model state, logs and rows.

    Args:
      user_step: the model's `train_step`.
      shapes: the state's, whose optimizer state the servers have.
      moving: the step count, the parameters, the model state and the seed.
      batch: the batch.

    Raises:
      ValueError: if the step needs parameters that it has updated, or applies gradients twice.
    """
    contexts: list[PushContext] = []

    def make_context(rows: int, mask: RowMask) -> PushContext:
        contexts.append(PushContext(rows))
        return contexts[0]

    step, params, model_state, seed = moving
    state = shapes.replace(step=step, params=params, model_state=model_state, seed=seed,
                           opt_state=without_memory(shapes.opt_state))
    left, logs, rows = steps.train_one_batch(user_step, make_context, state, batch, None)
    return contexts[0].grads or {}, contexts[0].value, left.model_state, logs, jnp.asarray(rows, jnp.float32)


class RemoteStep:
    """A model's train step, which each worker that is sent it compiles once.

    Args:
      user_step: the model's `train_step`.
      shapes: the state's.
      spec: what the chief has compiled for, which batches that the worker reads must be like.
      check_labels: raises for targets that the loss cannot take, of such batches.
    """

    def __init__(self, user_step: steps.Step, shapes: TrainState, spec: BatchSpec, check_labels: Callable[[Any], None]):
        self._user_step, self._shapes, self._spec, self._check_labels = user_step, shapes, spec, check_labels

    @functools.cached_property
    def _compiled(self) -> Any:
        return compiled(functools.partial(outcome_of_step, self._user_step, self._shapes))

    def read(self, iterator: WorkerIterator) -> Any:
        """Returns the next batch of the worker's own data.

        Raises:
          DataError, ValueError: if it cannot be trained on.
        """
        batch = as_batch(next(iterator))
        self._spec.check(batch)
        self._check_labels(unpack_x_y_sample_weight(batch)[1])
        return batch

    def __call__(self, client: ModelClient, number: int, batch: Any) -> tuple[list[np.ndarray], Any, int]:
        """Makes one step; returns the leaves of its logs, its rows, and the staleness of its gradients."""
        params, model_state, _ = client.pull()
        moving = np.int32(client.first_step + number), params, model_state, np.uint32(client.seed)
        grads, value, model_state, logs, rows = jax.device_get(self._compiled(moving, batch))
        staleness = client.push(number, grads, value, model_state)
        return jax.tree.leaves(logs), rows, staleness


def train_on_batch(
    step: RemoteStep, client: ModelClient, number: int, batch: Any, arrays: HostArrays | WorkerIterator | None
) -> Any:
    """Runs in a worker: makes one step.

    Args:
      step: the step.
      client: pulls and pushes.
      number: which step of the state's it is.
      batch: the batch, or the numbers of its rows in `arrays`.
      arrays: the data, where the worker has them; or its own data, of which it takes the next batch.
    """
    if isinstance(arrays, WorkerIterator):
        batch = step.read(arrays)
    elif arrays is not None:
        batch = jax.tree.map(lambda leaf: leaf[0], arrays.gather(batch[None], None, POOL))
    return step(client, number, batch)
