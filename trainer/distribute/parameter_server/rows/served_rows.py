"""Placeholders for tables whose rows are on parameter servers, and lookups in them by `nn.Embed`.

Owns every use of such a table. It must not choose the rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax.typing import DTypeLike

from trainer.core.types import PyTree
from trainer.distribute.parameter_server.rows.take_rows import take_rows

_CALL, _SETUP = (inspect.unwrap(method) for method in (nn.Embed.__call__, nn.Embed.setup))


def refusal(name: str, use: str) -> ValueError:
    """Returns the error for a table that is used other than by looking up rows."""
    return ValueError(f"The table {name!r} is {use}. `variable_partitioner` splits it, so that its rows are on the "
                      "parameter servers, and a step gets only the rows that `nn.Embed` looks up. Call "
                      "`nn.Embed` only, or keep the table whole: give the strategy a partitioner that does not split "
                      "it, such as one of a larger `min_shard_bytes`, or none.")


class Absent:
    """An array with only a shape and a dtype; every other use raises."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, make_error: Callable[[], Exception]):
        self.shape, self.dtype, self.ndim, self.size = shape, dtype, len(shape), int(np.prod(shape))
        self._make_error = make_error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._make_error()

    def __getattr__(self, name: str) -> Any:  # also for attributes that JAX looks for in an argument
        if name in ("__setstate__", "__deepcopy__", "_make_error"):
            raise AttributeError(name)
        raise self._make_error()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __getitem__ = __len__ = __iter__ = _refuse


class Table:
    """A table, and the indices of its rows in a step.

    Attributes:
      name: path of the parameter.
      shape: shape of the whole table.
      dtype: dtype of the table.
      numbers: indices of the present rows; see `take_rows`.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: DTypeLike, numbers: jax.Array):
        self.name, self.shape, self.dtype, self.numbers = name, shape, dtype, numbers


@jax.tree_util.register_pytree_with_keys_class
class ServedRows(Absent):
    """Some rows of a table, or their gradients; a pytree with a single array."""

    def __init__(self, rows: jax.Array, table: Table):
        super().__init__(table.shape, table.dtype, lambda: refusal(table.name, "used by itself in a step"))
        self.rows, self.table = rows, table

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Table]:
        """Returns the rows, and the table."""
        return ((jax.tree_util.GetAttrKey("rows"), self.rows),), self.table

    @classmethod
    def tree_unflatten(cls, table: Table, children: Any) -> ServedRows:
        """Returns other rows of the table."""
        return cls(children[0], table)

    def look_up(self, ids: jax.Array) -> Any:
        """Returns the rows of ids, as `jnp.take`: negative ids count from the end, ids out of range give NaN."""
        count = self.table.shape[0]
        ids = jnp.asarray(ids)
        # Converts to int32 without overflow. -1 replaces ids out of range.
        ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else jnp.clip(
            ids, None if jnp.issubdtype(ids.dtype, jnp.unsignedinteger) else -count - 1, count).astype(jnp.int32)
        ids = jnp.where(ids < 0, ids + count, ids)
        ids = jnp.where((ids < 0) | (ids >= count), -1, ids)
        return take_rows(self.rows, self.table.numbers, ids, self.table.name)


def plain(tree: PyTree) -> Any:
    """Returns a tree with arrays of rows in place of `ServedRows`."""
    return jax.tree.map(lambda leaf: leaf.rows if isinstance(leaf, ServedRows) else leaf, tree,
                        is_leaf=lambda leaf: isinstance(leaf, ServedRows))


@contextlib.contextmanager
def lookups_in_linen() -> Iterator[None]:
    """Makes `nn.Embed` look up rows of `ServedRows`, in modules that are called in the block."""
    with nn.intercept_methods(_intercept):
        try:
            yield
        except ScopeParamShapeError as error:
            raise ValueError(f"A parameter `embedding` that `variable_partitioner` splits is not `nn.Embed`'s own: "
                             f"{error} Give it another name, or the strategy a partitioner that does not split it, "
                             "so that it stays whole.") from error


def _intercept(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
    module = context.module
    if not isinstance(module, nn.Embed) or module.scope is None:
        return next_call(*args, **kwargs)
    rows = module.scope.get_variable("params", "embedding")
    if not isinstance(rows, ServedRows):
        return next_call(*args, **kwargs)
    method = getattr(context.orig_method, "func", None)
    if method is _SETUP:
        object.__setattr__(module, "embedding", rows)  # Flax would compare the number of rows
        return None
    if method is _CALL:
        return _looked_up(module, rows, *args, **kwargs)
    if context.method_name == "attend":
        raise refusal(rows.table.name, "used whole, by `attend`")
    return next_call(*args, **kwargs)


def _looked_up(module: nn.Embed, rows: ServedRows, inputs: Any) -> Any:
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError("Input type must be an integer or unsigned integer.")  # as Flax says
    (taken,) = module.promote_dtype(rows.look_up(inputs), dtype=module.dtype, inexact=False)
    return taken
