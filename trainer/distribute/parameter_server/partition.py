"""Assignment of parameters, and of their optimizer state, to servers.

Parameters stay whole: each server has some of them, of about equal total bytes, with their part of the optimizer's
state. For every optimizer that treats each array separately, an update of a part then equals the update of the whole.
Embedding tables that a partitioner splits are the exception: each server has some of their rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.core.compile.jit import compiled
from trainer.core.train_state import TrainState, initial_opt_state
from trainer.core.tree_paths import kept, named_leaves, with_leaves
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.partitioners import Partitioner
from trainer.optimizers.evaluation_params import keeps_averages
from trainer.optimizers.transforms.accumulation import AveragedGradientsState

Leaves = dict[str, Any]
"""Arrays by their paths."""

_SHORT = 2  # rows of a table for the check of an optimizer


def nbytes(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> int:
    """Returns the size in bytes of an array, or of an array with this shape."""
    return leaf.size * leaf.dtype.itemsize


def part_of(tree: PyTree, names: Collection[str]) -> Any:
    """Returns the part of nested dicts with the leaves at some paths."""
    return kept(tree, names.__contains__)


def update(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]) -> Any:
    """Returns parameters and optimizer state after an update, for all modules or only the modules in `grads`."""
    if not isinstance(optimizer, Mapping):
        return optimizer.update(grads, opt_state, params, extra)
    params, opt_state = dict(params), dict(opt_state)
    for name, tree in grads.items():
        params[name], opt_state[name] = optimizer[name].update(tree, opt_state[name], params[name], extra)
    return params, opt_state


@dataclasses.dataclass(frozen=True)
class Partition:
    """The parameters of each server.

    Attributes:
      parts: for each server the paths of its parameters.
      tables: the paths of the parameters whose rows are spread over all servers.
    """

    parts: tuple[frozenset[str], ...]
    tables: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, params: PyTree, servers: int, partitioner: Partitioner | None = None, embeddings: Collection[str] = ()
    ) -> Partition:
        """Returns parts of about equal bytes: each parameter, largest first, goes to the server with the fewest bytes.

        Args:
          params: the parameters, or their shapes.
          servers: number of servers.
          partitioner: chooses the tables to split into rows; None splits none.
          embeddings: the paths of the tables of `nn.Embed`.
        """
        parts: list[list[str]] = [[] for _ in range(servers)]
        load = [0] * servers
        leaves = named_leaves(params)
        tables = set() if partitioner is None else {
            name for name in leaves.keys() & embeddings if _is_split(leaves[name], partitioner)}
        leaves = {name: leaf for name, leaf in leaves.items() if name not in tables}
        for name in sorted(leaves, key=lambda name: (-nbytes(leaves[name]), name)):
            least = load.index(min(load))
            parts[least].append(name)
            load[least] += max(nbytes(leaves[name]), 1)
        return cls(tuple(map(frozenset, parts)), frozenset(tables))

    def state_of(self, state: TrainState, index: int) -> tuple[PyTree, PyTree]:
        """Returns the parameters and the optimizer's state of a server, without tables."""
        return _state_of(state, self.parts[index])

    def table_of(self, state: TrainState, name: str) -> tuple[PyTree, PyTree]:
        """Returns a table and its optimizer state."""
        return _state_of(state, {name})

    def joined(self, like: TrainState, params: Sequence[Leaves], opt_states: Sequence[Leaves]) -> TrainState:
        """Returns the state joined from the parts of the servers.

        Args:
          like: a state of the same structure.
          params: the parameters of each server, and of each table, by path.
          opt_states: the optimizer state of each server and table by path. Scalars that all of them have, such as
            counts, are taken from the first with trained parameters.
        """
        trained = set(named_leaves(like.trainable(like.params)))
        order = sorted(range(len(params)), key=lambda index: trained.isdisjoint(params[index]))
        joined: Leaves = {}
        for index in reversed(order):
            joined.update(opt_states[index])
        return like.replace(params=with_leaves(like.params, {k: v for part in params for k, v in part.items()}),
                            opt_state=with_leaves(like.opt_state, joined))

    def check(self, state: TrainState) -> None:
        """Checks that the optimizer's update of each part equals this part of its update of the whole.

        Both are computed once, for random gradients of a state of host arrays.

        Raises:
          ValueError: if the updates differ.
        """
        def updated(params: PyTree, opt_state: PyTree, grads: PyTree) -> Any:
            return update(state.optimizer, grads, opt_state, params, {"value": np.float32(1.0)})

        # An optimizer may need more than servers know, such as the loss as a function.
        jax.eval_shape(updated, state.params, state.opt_state, state.trainable(state.params))
        if len(self.parts) == 1 and not self.tables:
            return
        self._check_opt_state(state)
        state = self._with_short_tables(state)
        parts = [(self.state_of(state, index), slice(None)) for index in range(len(self.parts))]
        for name in sorted(self.tables):
            table = self.table_of(state, name)
            parts += [(rows_of(table, slice(row, row + 1)), slice(row, row + 1)) for row in range(_SHORT)]
        rng = np.random.default_rng(0)
        leaves, structure = jax.tree.flatten(state.trainable(state.params))
        # Large, with sizes that differ between arrays and between rows, so that clipping is detected.
        grads = jax.tree.unflatten(structure, [
            (10 * (index + 1) * rng.normal(size=np.shape(leaf))).astype(leaf.dtype)
            for index, leaf in enumerate(leaves)])

        expected = named_leaves(jax.device_get(compiled(updated)(state.params, state.opt_state, grads)))
        for (params, opt_state), rows in parts:
            of_part = rows_of(part_of(grads, named_leaves(params)), rows)
            received = compiled(updated)(params, opt_state, of_part)
            for name, leaf in named_leaves(jax.device_get(received)).items():
                wanted = expected[name][rows] if np.ndim(expected[name]) else expected[name]
                if named_leaves(of_part) and not np.allclose(leaf, wanted, rtol=1e-4, atol=1e-6, equal_nan=True):
                    raise ValueError(f"The optimizer looks at several {'rows or ' if self.tables else ''}arrays at "
                                     "once, as `clip_by_global_norm` does, so that an update on each of "
                                     f"{len(self.parts)} parameter servers would differ from one of all parameters. "
                                     f"{self._fix}")

    @property
    def _fix(self) -> str:
        if self.tables:
            return (f"As `variable_partitioner` splits {sorted(self.tables)}, it must look at each row on its own, as "
                    "Adagrad, Adam, RMSprop and SGD do. Use such an optimizer, or no partitioner.")
        return ("Use `num_ps=1`, or an optimizer that looks at one array at a time, such as Adam, LAMB or SGD without "
                "`clip_by_global_norm`; `optax.clip` and `optax.adaptive_grad_clip` do.")

    def _check_opt_state(self, state: TrainState) -> None:
        """Raises ValueError if the optimizer's state cannot be split, or has more than the last update of each row."""
        whole = {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(state.opt_state).items()}
        found: dict[str, Any] = {}
        for names in (*self.parts, *({name} for name in self.tables)):
            params = part_of(state.params, names)
            shapes = named_leaves(_opt_shapes(state.optimizer, params))
            found |= {name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
            if not self.tables.isdisjoint(names) and {leaf.shape for leaf in shapes.values()} - {
                    (), *(leaf.shape for leaf in named_leaves(params).values())}:
                raise ValueError(f"The optimizer's state has no row for each row of {sorted(names)}. {self._fix}")
        if found != whole:
            raise ValueError("The optimizer's state cannot be split over several parameter servers: it does not "
                             f"have the parameters' paths. {self._fix}")
        if any(_collects(self.table_of(state, name)[1]) for name in self.tables):
            raise ValueError("The optimizer averages parameters or collects gradients over several steps, in which a "
                             f"row without a gradient would be left out. {self._fix}")

    def _with_short_tables(self, state: TrainState) -> TrainState:
        """Returns a state of host arrays with only the first rows of tables."""
        params, opt_state = named_leaves(state.params), named_leaves(state.opt_state)
        for name in self.tables:
            table, of_table = rows_of(self.table_of(state, name), slice(_SHORT))
            # With different sizes, because optimizers such as LAMB depend on the size of the parameters.
            params |= {path: leaf * np.arange(1, len(leaf) + 1)[:, None].astype(leaf.dtype)
                       for path, leaf in named_leaves(table).items()}
            opt_state |= named_leaves(of_table)
        return state.replace(
            params=with_leaves(state.params, params), opt_state=with_leaves(state.opt_state, opt_state))


def rows_of(tree: PyTree, rows: slice | jax.Array) -> Any:
    """Returns some rows of the arrays of a tree; scalars are unchanged."""
    return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) else leaf, tree)


def _is_split(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct, partitioner: Partitioner) -> bool:
    # Mapped layers have several tables in one array.
    return (leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
            and partitioner(leaf.shape, leaf.dtype)[0] > 1)


def _collects(opt_state: PyTree) -> bool:
    """Returns whether an optimizer skips some of its updates, or keeps averages for `evaluate`."""
    def is_node(node: Any) -> bool:
        return isinstance(node, (optax.MultiStepsState, AveragedGradientsState))

    return keeps_averages(opt_state) or any(map(is_node, jax.tree.leaves(opt_state, is_leaf=is_node)))


def _state_of(state: TrainState, names: Collection[str]) -> tuple[PyTree, PyTree]:
    params = part_of(state.params, names)
    shapes = _opt_shapes(state.optimizer, params)
    leaves = named_leaves(state.opt_state)
    return params, with_leaves(shapes, {name: leaves[name] for name in named_leaves(shapes)})


def _opt_shapes(optimizer: Any, params: PyTree) -> Any:
    def made(params: PyTree) -> Any:
        named = isinstance(optimizer, Mapping)
        return initial_opt_state({name: optimizer[name] for name in params} if named else optimizer, params)

    return jax.eval_shape(made, params)
