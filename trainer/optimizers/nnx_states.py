"""optax transformations that take an `nnx.State`, as `nnx.Optimizer` gives them, instead of nested dicts.

Owns the conversion of trees for labels and masks that are such a state, or are made from one by `nnx.map_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from trainer.core.types import PyTree

Path = tuple[Any, ...]


def taking_dicts(
    transformation: optax.GradientTransformation, variables: Mapping[Path, Any]
) -> optax.GradientTransformation:
    """Adapts a transformation that takes `nnx.State`s to nested dicts; returns any other transformation unchanged.

    Args:
      transformation: an optax transformation.
      variables: the parameters that it gets, by their paths in an NNX module; their values may be shapes.

    Example:
      >>> net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> state = nnx.state(net, nnx.Param)
      >>> labels = nnx.map_state(lambda path, value: path[-1], state)
      >>> by_name = optax.partition({"kernel": optax.sgd(0.5), "bias": optax.set_to_zero()}, labels)
      >>> transformation = taking_dicts(by_name, dict(nnx.to_flat_state(state)))
      >>> params = {"kernel": jax.numpy.ones((2, 3)), "bias": jax.numpy.ones(3)}
      >>> updates, _ = transformation.update(params, transformation.init(params), params)
      >>> float(updates["kernel"][0, 0]), float(updates["bias"][0])
      (-0.5, 0.0)
    """
    by_name = {tuple(map(str, path)): (path, variable) for path, variable in variables.items()}

    def begun(params: PyTree) -> Any:
        # As in `nnx.Optimizer`, the first state is made from variables, and every update from their arrays.
        state = transformation.init(nnx.from_flat_state({
            by_name[name][0]: by_name[name][1].replace(value) for name, value in flatten_dict(params).items()}))
        return jax.tree.map(_value, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def state_of(tree: PyTree) -> Any:
        return None if tree is None else nnx.from_flat_state({
            by_name[name][0]: value for name, value in flatten_dict(tree).items()})

    shapes = unflatten_dict({name: jax.ShapeDtypeStruct(variable.get_value().shape, variable.get_value().dtype)
                             for name, (_, variable) in by_name.items()})
    if _begins(transformation.init, shapes) or not _begins(begun, shapes):
        return transformation
    inner = optax.with_extra_args_support(transformation)

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(state_of(grads), state, state_of(params), **extra)
        return unflatten_dict({tuple(map(str, path)): value for path, value in nnx.to_flat_state(updates)}), state

    return optax.GradientTransformationExtraArgs(begun, update)


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _begins(init: Any, params: PyTree) -> bool:
    try:
        jax.eval_shape(init, params)
    except Exception:  # of optax, or of the user's own function of labels
        return False
    return True
