"""Which server has which parameters, and what of a training state goes with them.

Parameters stay whole: a server has some of them, about as many bytes as the others, with their part of the optimizer's
state. An update on a part is then the update on the whole for every optimizer that looks at one array at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.compile.jit import compiled
from trainer.core.train_state import TrainState, initial_opt_state
from trainer.core.tree_paths import kept, named_leaves, with_leaves
from trainer.core.types import PyTree

Leaves = dict[str, Any]
"""Arrays by their paths."""


def nbytes(leaf: Any) -> int:
    """Returns how many bytes an array takes, or one of a shape."""
    return leaf.size * leaf.dtype.itemsize


def part_of(tree: PyTree, names: Collection[str]) -> Any:
    """Returns the part of nested dicts that has the leaves of some paths."""
    return kept(tree, names.__contains__)


def update(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]) -> Any:
    """Returns parameters and optimizer state after an update, of a whole model or of a part.

    Args:
      optimizer: an `UpdateRule`, or a mapping of them by module name.
      grads: gradients of the trained parameters; for a mapping, those of some of its modules.
      opt_state: the optimizer's state.
      params: the parameters.
      extra: what an optimizer may ask for besides.
    """
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
    """

    parts: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, params: PyTree, servers: int) -> Partition:
        """Returns parts of about equally many bytes: each parameter, the largest first, goes where the fewest are."""
        parts: list[list[str]] = [[] for _ in range(servers)]
        load = [0] * servers
        leaves = named_leaves(params)
        for name in sorted(leaves, key=lambda name: (-nbytes(leaves[name]), name)):
            least = load.index(min(load))
            parts[least].append(name)
            load[least] += max(nbytes(leaves[name]), 1)
        return cls(tuple(map(frozenset, parts)))

    def state_of(self, state: TrainState, index: int) -> tuple[PyTree, PyTree]:
        """Returns the parameters and the optimizer's state of one server."""
        params = part_of(state.params, self.parts[index])
        shapes = _opt_shapes(state.optimizer, params)
        leaves = named_leaves(state.opt_state)
        return params, with_leaves(shapes, {name: leaves[name] for name in named_leaves(shapes)})

    def joined(self, like: TrainState, params: Sequence[Leaves], opt_states: Sequence[Leaves]) -> TrainState:
        """Returns the state whose parts servers have.

        Args:
          like: a state of the same structure.
          params: each server's parameters by their paths.
          opt_states: each server's optimizer state by its paths. Numbers that all of them have, such as counts, are
            taken from the first that has parameters which are trained.
        """
        trained = set(named_leaves(like.trainable(like.params)))
        order = sorted(range(len(params)), key=lambda index: trained.isdisjoint(params[index]))
        joined: Leaves = {}
        for index in reversed(order):
            joined.update(opt_states[index])
        return like.replace(params=with_leaves(like.params, {k: v for part in params for k, v in part.items()}),
                            opt_state=with_leaves(like.opt_state, joined))

    def check(self, state: TrainState) -> None:
        """Refuses an optimizer whose update of a part is not that part of its update of all.

        Both are computed once, for random gradients.

        Args:
          state: a state of host arrays.

        Raises:
          ValueError: for such an optimizer.
        """
        def updated(params: PyTree, opt_state: PyTree, grads: PyTree) -> Any:
            return update(state.optimizer, grads, opt_state, params, {"value": np.float32(1.0)})

        # An optimizer may ask for more than servers know, such as the loss as a function.
        jax.eval_shape(updated, state.params, state.opt_state, state.trainable(state.params))
        if len(self.parts) == 1:
            return
        whole = {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(state.opt_state).items()}
        parts = [named_leaves(_opt_shapes(state.optimizer, part_of(state.params, names))) for names in self.parts]
        found = {name: (leaf.shape, leaf.dtype) for part in parts for name, leaf in part.items()}
        fix = ("Use `num_ps=1`, or an optimizer that looks at one array at a time, such as Adam, LAMB or SGD without "
               "`clip_by_global_norm`; `optax.clip` and `optax.adaptive_grad_clip` do.")
        if found != whole:
            raise ValueError("The optimizer's state cannot be split over several parameter servers: it does not "
                             f"have the parameters' paths. {fix}")
        rng = np.random.default_rng(0)
        leaves, structure = jax.tree.flatten(state.trainable(state.params))
        # Of sizes that differ from array to array, and large: an optimizer that clips shows it.
        grads = jax.tree.unflatten(structure, [
            ((index + 1) * rng.normal(size=np.shape(leaf))).astype(leaf.dtype) for index, leaf in enumerate(leaves)])

        expected = named_leaves(jax.device_get(compiled(updated)(state.params, state.opt_state, grads)))
        for index, names in enumerate(self.parts):
            params, opt_state = self.state_of(state, index)
            received = compiled(updated)(params, opt_state, part_of(grads, names))
            for name, leaf in named_leaves(jax.device_get(received)).items():
                if not np.allclose(leaf, expected[name], rtol=1e-4, atol=1e-6, equal_nan=True) and (
                        named_leaves(part_of(grads, names))):
                    raise ValueError("The optimizer looks at several arrays at once, as `clip_by_global_norm` does, so "
                                     f"that an update on each of {len(self.parts)} parameter servers would differ from "
                                     f"one of all parameters. {fix}")


def _opt_shapes(optimizer: Any, params: PyTree) -> Any:
    def made(params: PyTree) -> Any:
        named = isinstance(optimizer, Mapping)
        return initial_opt_state({name: optimizer[name] for name in params} if named else optimizer, params)

    return jax.eval_shape(made, params)
