"""Code of a partitioned step that runs once per replica, on its rows.

Owns the requirements on its arguments and outputs. The context of the step runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from trainer.core import errors
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.replica_context import get_replica_context

Function = TypeVar("Function", bound=Callable[..., Any])


@explains_arguments
def on_each_replica(function: Function) -> Function:
    """Returns a function that runs once on each replica, with the rows of its share of the batch.

    Use it for code that XLA cannot divide over devices, such as a Pallas kernel, a callback or a call of another
    library: XLA would gather the whole batch for it on each device. Each row of the outputs must depend only on its own
    row of the arguments. Results then equal the undivided computation. Gradients pass through it, including gradients
    of whole arrays.

    It is called unchanged if there is a single replica: on one device, in a function of `strategy.run`, outside of a
    step, and if the replicas do not divide the rows of a batch.

    Args:
      function: takes trees of arrays. Arrays in positional arguments have the rows of the batch as first axis and are
        split. Scalars and keyword arguments are whole on each replica: pass parameters by keyword. It returns a tree of
        arrays with the replica's rows as first axis, which are concatenated to the rows of the batch. Inside it,
        `get_replica_context()` is the context of a single replica. Draw random numbers outside of it, or pass a key for
        each row.

    Raises:
      ValueError: when called in a compiled step, if a positional array or an output does not have the rows as first
        axis, or if the function combines rows (for example by a sum) or draws the numbers of all rows by one key.

    Example:
      >>> import jax.numpy as jnp
      >>> @on_each_replica
      ... def norms(x, *, scale):
      ...     on_host = lambda x: np.linalg.norm(x, axis=-1)
      ...     return scale * jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)
      >>> norms(jnp.array([[3.0, 4.0], [0.0, 2.0]]), scale=jnp.array(2.0)).tolist()
      [10.0, 4.0]
    """
    @functools.wraps(function)
    def on_rows(*args: Any, **kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        rows = get_replica_context().rows
        if rows is not None:  # inside of a step
            _check_rows(outputs, rows, getattr(function, "__name__", type(function).__name__))
        return outputs

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return get_replica_context().map_over_rows(on_rows, args, kwargs)

    return call  # type: ignore[return-value]


def _check_rows(outputs: Any, rows: int, name: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not isinstance(leaf, (jax.Array, np.ndarray)) or leaf.shape[:1] != (rows,):
            place = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(
                f"`{name}` runs on each replica, and must return a value for each of the replica's {rows} rows: arrays "
                f"of shape ({rows}, ...). Received{place}: {errors.describe(leaf)}. A value of all rows, such as a "
                "mean, needs the rows of the other replicas: return one value per row, and take the mean outside.")
