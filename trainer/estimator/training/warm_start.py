"""Warm start from the weights of another training."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.core import arguments, errors, tree_paths
from trainer.engine.model.model import Model
from trainer.engine.saving.checkpoint import is_checkpoint
from trainer.estimator.training import checkpoints


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Weights to start a training from. The step and the optimizer's state are not restored.

    Args:
      ckpt_to_initialize_from: the `model_dir` of another training, for its newest checkpoint, or the path of a
        checkpoint.
      vars_to_warm_start: regular expression, or a list of them, to search in the names of the model's variables, such
        as "params/Dense_0/.*". None selects nothing.
      var_name_to_prev_var_name: names in the checkpoint by this model's names, for renamed variables.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if a regular expression is invalid.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/WarmStartSettings
    """

    ckpt_to_initialize_from: str | os.PathLike[str]
    vars_to_warm_start: str | Sequence[str] | None = ".*"
    var_name_to_prev_var_name: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        arguments.as_path("ckpt_to_initialize_from", self.ckpt_to_initialize_from, "the path of a folder")
        for pattern in self.patterns:
            if not isinstance(pattern, str):
                raise errors.wrong_type("vars_to_warm_start", pattern, "a regular expression, or a list of them")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`vars_to_warm_start` has {pattern!r}, which is no regular expression: {error}."
                                 ) from None
        names = self.var_name_to_prev_var_name
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for pair in names.items() for name in pair):
            raise errors.wrong_type("var_name_to_prev_var_name", names, "a dict of names in the checkpoint "
                                    "by this model's")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The regular expressions of `vars_to_warm_start`."""
        patterns = self.vars_to_warm_start
        is_one = isinstance(patterns, str) or not isinstance(patterns, Iterable | None)
        return (patterns,) if is_one else tuple(patterns or ())  # type: ignore[return-value]


def as_settings(value: object) -> WarmStartSettings | None:
    """Returns `warm_start_from` as settings; a path selects all weights."""
    if value is None or isinstance(value, WarmStartSettings):
        return value
    return WarmStartSettings(arguments.as_path(
        "warm_start_from", value, "the path of a folder or checkpoint, or `WarmStartSettings`"))


def warm_start(model: Model, settings: WarmStartSettings) -> list[str]:
    """Replaces weights of a built model by weights of a checkpoint; returns their names.

    Raises:
      ValueError: if there is no checkpoint, an expression matches nothing, a renamed variable is not selected, a weight
        is missing in the checkpoint, or its shape differs.
    """
    path = os.fsdecode(settings.ckpt_to_initialize_from)
    checkpoint = checkpoints.opened(path) if is_checkpoint(path) else checkpoints.newest(path)
    if checkpoint is None:
        raise ValueError(f"`warm_start_from` has no checkpoint: {path!r}.")
    there = checkpoints.read_variables(checkpoint)
    state = model.state
    weights = {"params": state.params, "model_state": state.model_state}
    leaves = tree_paths.named_leaves(weights)
    unknown = sorted(set(settings.var_name_to_prev_var_name) - set(leaves))
    if unknown:
        raise ValueError(f"`var_name_to_prev_var_name` names {unknown}, which the model has not. "
                         f"{errors.near_hint(unknown[0], leaves)}")
    taken = [name for name in leaves if any(re.search(pattern, name) for pattern in settings.patterns)]
    for pattern in settings.patterns:
        if not any(re.search(pattern, name) for name in leaves):
            raise ValueError(f"`vars_to_warm_start` has {pattern!r}, which matches no variable of the model. They are: "
                             f"{', '.join(list(leaves)[:errors.MAX_ITEMS])}.")
    unused = sorted(set(settings.var_name_to_prev_var_name) - set(taken))
    if unused:
        raise ValueError(f"`var_name_to_prev_var_name` names {unused}, which `vars_to_warm_start` does not match. "
                         "Leave them out, or give a regular expression for them too.")
    values: dict[str, Any] = {}
    for name in taken:
        previous = settings.var_name_to_prev_var_name.get(name, name)
        if previous not in there:
            raise ValueError(f"The checkpoint {checkpoint.path!r} has no variable {previous!r}. "
                             f"{errors.near_hint(previous, there)} Give its name there in `var_name_to_prev_var_name`, "
                             "or leave the variable out of `vars_to_warm_start`.")
        value = there[previous]
        if np.shape(value) != leaves[name].shape:
            raise ValueError(f"{name!r} has the shape {leaves[name].shape}, and {previous!r} of the checkpoint "
                             f"{checkpoint.path!r} {np.shape(value)}. Leave it out of `vars_to_warm_start`.")
        values[name] = value.astype(leaves[name].dtype)
    replaced = tree_paths.with_leaves(weights, {**leaves, **values})
    # In the order of `get_weights`. Also resets averages of weights.
    model.set_weights([np.asarray(leaf) for part in ("params", "model_state")
                       for leaf in jax.tree.leaves(replaced[part])])
    return taken
