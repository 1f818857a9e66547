"""A model's outputs by name, the matching of targets, weights, losses and metrics to them, and the union of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.core import errors
from trainer.core.types import PyTree


def is_nested(value: object) -> bool:
    """Returns whether `value` is a dict, list or tuple rather than an array or an object."""
    return isinstance(value, (Mapping, list, tuple))


def output_names(outputs: PyTree) -> list[str | None]:
    """Returns a name per output; None for a single output.

    The name is the key in a dict, the field of a NamedTuple or dataclass, or "output_1"... in a tuple or list; nested
    names are joined by "/".
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(outputs)]
    if len(paths) == 1:
        return [None]
    return ["/".join(str(_key(entry)) for entry in path) for path in paths]


def _key(entry: Any) -> Any:
    """Returns the user's name of an entry of a container."""
    if isinstance(entry, jax.tree_util.SequenceKey):
        return f"output_{entry.idx + 1}"
    return entry.name if isinstance(entry, jax.tree_util.GetAttrKey) else entry.key


def _children(container: PyTree) -> dict[Any, Any]:
    """Returns the entries of a dict, tuple, list or dataclass in the order of its leaves; empty for an array."""
    entries = jax.tree_util.tree_leaves_with_path(container, is_leaf=lambda node: node is not container)
    return {_key(path[0]): child for path, child in entries if path}


def without_rows(outputs: PyTree, rows: int, fix: str) -> ValueError:
    """Returns the error for outputs whose first axis is not the rows of the batch.

    Args:
      outputs: an output, or a tree of outputs.
      rows: number of rows of the batch, or of the replica's share.
      fix: the remedy.
    """
    names = output_names(outputs)
    wrong = [repr(name) for name, leaf in zip(names, jax.tree.leaves(outputs), strict=True)
             if np.shape(leaf)[:1] != (rows,)]
    named = f", of which {', '.join(wrong)} {'does' if len(wrong) == 1 else 'do'} not," if len(names) > 1 else ""
    return ValueError("The outputs of the model must have the rows of the batch as their first axis. "
                      f"Received: {errors.describe(outputs)}{named} for {rows} rows. {fix}")


def match_arrays(
    argument: str, values: PyTree, outputs: PyTree, may_repeat: bool = False, wanted: Sequence[bool] = ()
) -> list[Any]:
    """Returns the leaf of `values` for each output; None for outputs without a value.

    Args:
      argument: "y" or "sample_weight", for error messages.
      values: an array, or a tree like `outputs`, or a dict with some of its keys or of its outputs' names.
      outputs: the model's outputs.
      may_repeat: whether a single array serves all outputs.
      wanted: which outputs need a value. An array, or a list of arrays, that matches the outputs in no other way, is
        assigned to these outputs, as in Keras.

    Raises:
      ValueError: if the structures do not match.
    """
    matched = _matched(values, outputs, may_repeat)
    if matched is None and len(wanted) == len(output_names(outputs)):
        matched = _spread(values, wanted)
    if matched is None:
        both = "y_true and y_pred have different structures.\n" if argument == "y" else ""
        names = output_names(outputs)
        called = f", and are called {names}" if isinstance(values, Mapping) and len(names) > 1 else ""
        if isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[1], Mapping):
            called += ". `self.apply` returns a pair: `y_pred, model_state = self.apply(params, state, x)`"
        raise ValueError(f"{both}`{argument}` must have one array per output of the model. Received: "
                         f"{errors.describe(values)}; the model's outputs are {errors.describe(outputs)}{called}.")
    return matched


def _matched(values: PyTree, outputs: PyTree, may_repeat: bool) -> list[Any] | None:
    names = output_names(outputs)
    if values is None:
        return [None] * len(names)
    leaves = jax.tree.leaves(values)
    if len(leaves) == 1 and (len(names) == 1 or (may_repeat and not is_nested(values))):
        return leaves * len(names)
    if isinstance(values, Mapping):
        children = _children(outputs)
        if set(values) <= set(children):
            return _joined([(values.get(name), child) for name, child in children.items()], may_repeat)
        if set(values) <= set(names) and not any(map(is_nested, values.values())):
            return [values.get(name) for name in names]
        return None
    if isinstance(values, (list, tuple)) and isinstance(outputs, (list, tuple)) and len(values) == len(outputs):
        matched = _joined(list(zip(values, outputs, strict=True)), may_repeat)
        if matched is not None:
            return matched
    structure: Any = jax.tree.structure(values)
    if structure == jax.tree.structure(outputs):
        return leaves
    # Without names, the values of a flat list are in the order of the outputs.
    return leaves if len(leaves) == len(names) and not (_has_keys(values) or _has_keys(outputs)) else None


def _joined(pairs: list[tuple[Any, Any]], may_repeat: bool) -> list[Any] | None:
    parts = [_matched(values, outputs, may_repeat) for values, outputs in pairs]
    return None if any(part is None for part in parts) else [leaf for part in parts for leaf in part or ()]


def _spread(values: PyTree, wanted: Sequence[bool]) -> list[Any] | None:
    leaves = jax.tree.leaves(values)
    if len(leaves) != sum(wanted) or _has_keys(values):
        return None
    remaining = iter(leaves)
    return [next(remaining) if is_wanted else None for is_wanted in wanted]


def _has_keys(tree: PyTree) -> bool:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return any(isinstance(entry, jax.tree_util.DictKey) for path, _ in paths for entry in path)


def match_choices(
    argument: str, choices: Any, outputs: PyTree, is_list_per_output: Callable[[Sequence[Any], int], bool]
) -> list[Any]:
    """Returns the loss, weight or metrics of each output; None for outputs without a choice.

    Args:
      argument: the name of the argument, for error messages.
      choices: a choice for all outputs, a dict by output name, or a list with an entry per output. Choices for nested
        outputs may be nested likewise.
      outputs: the model's outputs.
      is_list_per_output: returns whether a list holds a choice for each output, given the number of outputs.

    Raises:
      KeyError: if a dict names an unknown output.
      ValueError: if the length of a list differs from the number of outputs.
    """
    names, children = output_names(outputs), _children(outputs)
    is_per_output = isinstance(choices, (list, tuple)) and is_list_per_output(choices, len(names))
    pairs: list[tuple[Any, Any]] = []
    if isinstance(choices, Mapping) and set(choices) <= set(children):
        pairs = [(choices.get(name), child) for name, child in children.items()]
    elif is_per_output and isinstance(outputs, (list, tuple)) and len(choices) == len(children) < len(names):
        pairs = list(zip(choices, children.values(), strict=True))
    if pairs:
        return [each for choice, child in pairs for each in match_choices(argument, choice, child, is_list_per_output)]
    if isinstance(choices, Mapping):
        known = [name for name in names if name is not None]
        if len(names) == 1 and len(choices) == 1 and not known:
            return list(choices.values())
        for name in choices:
            if name not in known:
                near = errors.near_names(str(name), known)
                raise KeyError(f"`{argument}` names the output {name!r}, which can't be found in the model's output "
                               f"(`y_pred`). Its outputs are {known or 'one array without a name'}."
                               + (f" Did you mean {near[0]!r}?" if near else ""))
        return [choices.get(name) for name in names]
    if is_per_output:
        if len(choices) != len(names):
            raise ValueError(f"`{argument}` must match the number of losses and outputs: it has {len(choices)} entries "
                             f"and the model has {len(names)} output{'s' if len(names) > 1 else ''}.")
        return list(choices)
    return [choices] * len(names)


def collect(batches: Iterator[Any], rows: int | float | None) -> Any:
    """Returns the outputs of all batches as a single tree of arrays.

    Args:
      batches: trees of host arrays, rows first.
      rows: total number of rows, if known: the result is then allocated once and filled.

    Raises:
      ValueError: if the outputs of two batches differ in more than their rows.
    """
    batches = _of_equal_sizes(batches)
    if rows is None or math.isinf(rows):
        parts = list(batches)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    filled, start = None, 0
    for batch in batches:
        if filled is None:
            filled = jax.tree.map(lambda leaf: np.empty((int(rows), *leaf.shape[1:]), leaf.dtype), batch)
        stop = start + jax.tree.leaves(batch)[0].shape[0]
        jax.tree.map(lambda whole, part, at=slice(start, stop): whole.__setitem__(at, part), filled, batch)
        start = stop
    return jax.tree.map(lambda leaf: leaf[:start], filled)


def _of_equal_sizes(batches: Iterator[Any]) -> Iterator[Any]:
    sizes = None
    for number, batch in enumerate(batches):
        received = [leaf.shape[1:] for leaf in jax.tree.leaves(batch)]
        sizes = received if sizes is None else sizes
        if received != sizes:
            raise ValueError(f"`predict` returns the outputs of all batches as one array, rows first. Received: "
                             f"outputs with rows of shape {', '.join(map(str, sizes))}, and of shape "
                             f"{', '.join(map(str, received))} for batch {number}. Use `predict_iter`, which yields "
                             "the outputs of each batch, or pad all batches to one length.")
        yield batch
