"""`take_rows`: lookup in a table of which only some rows are present.

It is a separate JAX primitive, so that a trace of a step shows the ids that it looks up, and therefore the rows to
fetch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

TAKE_ROWS: Any = Primitive("take_rows")


def take_rows(rows: jax.Array, numbers: jax.Array, ids: jax.Array, name: str) -> Any:
    """Returns the rows of ids, shape `(*ids.shape, features)`; NaN for absent rows, as `jnp.take`.

    Args:
      rows: the present rows, shape `(count, features)`.
      numbers: their indices in the table, ascending, int32 of shape `(count,)`.
      ids: int32 of any shape.
      name: name of the table.
    """
    return TAKE_ROWS.bind(rows, numbers, ids, name=name)


def _places(numbers: jax.Array, ids: jax.Array) -> jax.Array:
    places = jnp.searchsorted(numbers, ids)
    return jnp.where(jnp.take(numbers, places, mode="clip") == ids, places, len(numbers))


def _taken(rows: jax.Array, numbers: jax.Array, ids: jax.Array, *, name: str) -> jax.Array:
    return jnp.take(rows, _places(numbers, ids), axis=0, mode="fill")


def _jvp(primals: Any, tangents: Any, *, name: str) -> Any:
    rows, numbers, ids = primals
    return take_rows(rows, numbers, ids, name), take_rows(ad.instantiate_zeros(tangents[0]), numbers, ids, name)


def _transpose(gradient: jax.Array, rows: jax.Array, numbers: jax.Array, ids: jax.Array, *, name: str) -> Any:
    if isinstance(gradient, ad.Zero):
        return None, None, None
    zeros = jnp.zeros(rows.aval.shape, gradient.dtype)
    return zeros.at[_places(numbers, ids)].add(gradient, mode="drop"), None, None


def _batched(args: Any, dims: Any, *, name: str) -> Any:
    rows, numbers, ids = args
    if dims[0] is not None or dims[1] is not None:
        raise ValueError(f"A step cannot map over the table {name!r}, whose rows are on the parameter servers.")
    return take_rows(rows, numbers, jnp.moveaxis(ids, dims[2], 0), name), 0


TAKE_ROWS.def_impl(_taken)
TAKE_ROWS.def_abstract_eval(lambda rows, numbers, ids, *, name: jax.core.ShapedArray(
    ids.shape + rows.shape[1:], rows.dtype))
ad.primitive_jvps[TAKE_ROWS] = _jvp
ad.primitive_transposes[TAKE_ROWS] = _transpose
batching.primitive_batchers[TAKE_ROWS] = _batched
mlir.register_lowering(TAKE_ROWS, mlir.lower_fun(_taken, multiple_results=False))
