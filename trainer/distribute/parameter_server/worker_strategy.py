"""The strategy in a scheduled function: the gradients of its `run` go to the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from trainer.core import replica_context
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import restricted
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.push_context import PushContext
from trainer.distribute.parameter_server.rows.rows_function import RowsFunction
from trainer.distribute.parameter_server.rows.served_rows import plain
from trainer.distribute.parameter_server.served_model import ModelClient, without_opt_state
from trainer.distribute.parameter_server.worker import Worker
from trainer.distribute.placement.devices import default_devices
from trainer.distribute.replica.distributed_dataset import InputContext
from trainer.distribute.replica.replicated_state import is_state
from trainer.distribute.strategies.strategy import Strategy


class WorkerStrategy(Strategy):
    """The strategy of code in a worker, which is a single replica."""

    def __init__(self, worker: Worker):
        super().__init__(default_devices()[:1])
        self.worker_index = worker.index
        self._input_context = InputContext(worker.num_workers, worker.index)
        self._clients: dict[int, tuple[TrainState, ModelClient]] = {}  # by the id of the last pulled state
        self._steps: dict[Any, _Step] = {}

    def pulled_state(self, client: ModelClient) -> TrainState:
        """Returns a model's state from `ModelClient.pull`, for `run`."""
        state = client.pull()
        self._clients = {key: value for key, value in self._clients.items() if value[1].key != client.key}
        self._clients[id(state)] = state, client
        return state

    def is_pulled(self, state: TrainState) -> bool:
        """Returns whether this is the last pulled state of a model."""
        return id(state) in self._clients

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        """Returns the dataset unchanged, because a worker is a single replica."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Any]) -> Any:
        """Returns the result of the function for this worker."""
        return dataset_fn(self._input_context)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs a function on this worker, compiled once per function and shapes.

        Gradients that it applies to a state read as `model.state` go to the parameter servers. It returns this state
        unchanged: read `model.state` again for the servers' state.

        Args:
          fn: a pure function of arrays; inside it, `get_replica_context()` is the context of a single replica.
          args: positional arguments of `fn`, with at most one pulled state.
          kwargs: keyword arguments of `fn`.

        Returns:
          The outputs of `fn`, as host arrays.
        """
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})), is_leaf=is_state)
        places = [index for index, leaf in enumerate(leaves) if is_state(leaf)]
        if len(places) > 1 or any(id(leaves[place]) not in self._clients for place in places):
            raise ValueError("In a scheduled function, `strategy.run` takes one state, as `model.state` has it there. "
                             f"Received: {len(places)} states. Read `model.state` right before, and pass it as it is.")
        place = places[0] if places else None
        state, client = (None, None) if place is None else self._clients[id(leaves[place])]
        key = fn, structure, place, None if client is None else client.key
        if key not in self._steps:
            self._steps[key] = _Step(fn, structure, place, client)
        return self._steps[key](leaves, state, client)


class _Step:
    """A compiled function of `WorkerStrategy.run`; its state, pulled with `client`, is the leaf at `place`, if any."""

    def __init__(self, function: Callable[..., Any], structure: Any, place: int | None, client: ModelClient | None):
        self._function, self._structure, self._place = function, structure, place
        self._shapes = None if client is None else client.shapes
        self._returned: Any = None  # structure of the function's result
        self._compiled = RowsFunction(
            self._traced, *((), ()) if client is None else (client.shapes.params, client.partition.tables))

    def __call__(self, leaves: list[Any], state: TrainState | None, client: ModelClient | None) -> Any:
        rest = [None if index == self._place else leaf for index, leaf in enumerate(leaves)]
        moving = None if state is None else state.replace(params={}, opt_state=None)
        (values, pushed), numbers = self._compiled(
            None if client is None else client.pull_rows, {} if state is None else state.params, moving, rest)
        if client is not None:
            grads, value, model_state = pushed
            client.push(None, grads, value, model_state, numbers)
        return jax.tree.unflatten(self._returned, [state if value is None else value for value in values])

    def _traced(self, params: PyTree, state: TrainState | None, leaves: list[Any]) -> tuple[list[Any], Any]:
        rows = next((leaf.shape[0] for leaf in jax.tree.leaves(leaves) if leaf.ndim), 1)
        context = PushContext(rows)
        if state is not None and self._shapes is not None and self._place is not None:
            leaves[self._place] = state = without_opt_state(
                state.replace(params=params, opt_state=self._shapes.opt_state))
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        with replica_context.enter(context):
            returned = self._function(*args, **kwargs)
        found, self._returned = jax.tree.flatten(returned, is_leaf=is_state)
        values = [None if is_state(leaf) else leaf for leaf in found]
        model_states = [leaf.model_state for leaf in found if is_state(leaf)]
        if state is None:
            return values, ()
        model_state = restricted(model_states[0], state.model_state) if model_states else state.model_state
        return values, (plain(context.grads or {}), context.value, model_state)
