"""What all processes of a job must have alike, in short texts to compare before anything runs over their devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from trainer.callbacks import CallbackList
from trainer.data import Reader
from trainer.paths import named_leaves
from trainer.state import TrainState


def describe_model(state: TrainState, batch: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns what there is to compare of a model.

    Args:
      state: its state, or the shapes of it.
      batch: the first batch that it is given, of which the dtypes and the shapes of a row count.
      settings: how it is compiled.

    >>> state = TrainState(step=np.int32(0), params={"kernel": np.ones((2, 3))}, model_state={}, opt_state=(), seed=0)
    >>> describe_model(state, np.ones((4, 2), np.float32), {})["parameters"]  # doctest: +ELLIPSIS
    '1 array, 6 values (...)'
    """
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
    trees = {"parameters": state.params, "model state": state.model_state, "optimizer state": state.opt_state,
             "row of the data": rows}
    return {**{name: _shapes(tree) for name, tree in trees.items()},
            **{name: str(value) for name, value in settings.items()}}


def describe_run(reader: Reader, callbacks: CallbackList, **arguments: Any) -> dict[str, str]:
    """Returns what there is to compare of a run: the number of its batches, its callbacks and other arguments."""
    in_all = [type(callback).__name__ for callback in callbacks.callbacks if callback.runs_on == "all"]
    each_batch = [kind for kind in ("train", "test", "predict") if callbacks.wants_batch_hooks(kind)]
    return {"batches of an epoch": str(reader.num_batches),
            'callbacks that run on "all"': ", ".join(in_all) or "none",
            "phases of which a callback sees each batch": ", ".join(each_batch) or "none",
            **{name: str(value) for name, value in arguments.items()}}


def _shapes(tree: Any) -> str:
    leaves = {name: (tuple(np.shape(leaf)), str(leaf.dtype)) for name, leaf in named_leaves(tree).items()}
    values = sum(int(np.prod(shape)) for shape, _ in leaves.values())
    digest = hashlib.sha256(repr(sorted(leaves.items())).encode()).hexdigest()[:8]
    return f"{len(leaves)} array{'s' * (len(leaves) != 1)}, {values:,} values ({digest})"
