"""The collection of a module that a step replaces by its gradient, as Flax's `TrainState` does.

Flax's FP8 layers keep scales and histories of absolute maxima there, and their backward passes return the next values
as gradients. Such a value is model state, no parameter: no optimizer, decay, clipping or average sees it.

Owns the place of the collection in trees: at the top, or at the top of each named module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.core.types import PyTree

OVERWRITTEN = "_overwrite_with_gradient"
"""Flax's name of the collection."""


def split(tree: PyTree) -> tuple[Any, dict[str, Any]]:
    """Returns a tree like `params` or `model_state` without the collection, and a tree of only the collection.

    >>> split({"kernel": 1, "_overwrite_with_gradient": {"scale": 2}})
    ({'kernel': 1}, {'_overwrite_with_gradient': {'scale': 2}})
    >>> split({"encoder": {"kernel": 1, "_overwrite_with_gradient": {"scale": 2}}, "head": {"kernel": 3}})
    ({'encoder': {'kernel': 1}, 'head': {'kernel': 3}}, {'encoder': {'_overwrite_with_gradient': {'scale': 2}}})
    """
    rest, overwritten = _split(tree)
    if overwritten or not isinstance(tree, Mapping):
        return rest, overwritten
    parts = {name: _split(value) for name, value in tree.items()}
    overwritten = {name: part for name, (_, part) in parts.items() if part}
    return {name: value for name, (value, _) in parts.items()} if overwritten else tree, overwritten


def joined(tree: PyTree, overwritten: Mapping[str, Any]) -> Any:
    """Returns a tree together with the collection: the inverse of `split`.

    >>> joined({"encoder": {"kernel": 1}}, {"encoder": {"_overwrite_with_gradient": {"scale": 2}}})
    {'encoder': {'kernel': 1, '_overwrite_with_gradient': {'scale': 2}}}
    """
    if not overwritten:
        return tree
    return {**tree, **{name: value if name == OVERWRITTEN else {**tree.get(name, {}), **value}
                       for name, value in overwritten.items()}}


def _split(tree: PyTree) -> tuple[Any, dict[str, Any]]:
    if not isinstance(tree, Mapping) or OVERWRITTEN not in tree:
        return tree, {}
    return {name: value for name, value in tree.items() if name != OVERWRITTEN}, {OVERWRITTEN: tree[OVERWRITTEN]}
