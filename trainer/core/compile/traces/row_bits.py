"""Random bits for a replica's rows, equal to the bits that a single device draws for all rows.

Owns the rewrite of a traced program. With `jax_threefry_partitionable`, JAX's default, a random number depends only on
the key and on its position in the array: a replica draws the numbers at the positions of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.random import threefry2x32_p

from trainer.core.compile.traces.equations import called, evaluated, with_equations


class UnlikeDraws(Exception):
    """The random draws depend on the number of rows."""


def can_draw_rows(equation: Any) -> bool:
    """Returns whether a `random_bits` equation can draw bits for some rows of a larger array, rows first."""
    key, params = equation.invars[0].aval, equation.params
    is_partitionable = bool(getattr(jax.config, "jax_threefry_partitionable", True))
    return (str(key.dtype) == "key<fry>" and key.shape == () and params["bit_width"] <= 32
            and math.prod(params["shape"][1:]) < 2**32 and is_partitionable)


def with_bits_of_rows(function: Callable[..., Any], axis_name: str | tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function of a replica's rows with the random draws of a single device for all rows.

    Args:
      function: a compiled, pure function of trees of arrays, of which the last tree holds the rows. Rows are the first
        axis of the bits drawn for them. The function is traced when the returned function is called; if it draws bits,
        also on twice the rows, to find the draws for rows.
      axis_name: name of the replica axis, or names in order, as for `jax.lax.axis_index`.

    Raises:
      UnlikeDraws: raised by the returned function, if draws differ in another way for twice the rows, as in code that
        depends on the number of rows.

    Example:
      >>> import jax.numpy as jnp
      >>> noise = jax.jit(lambda key, x: x + jax.random.normal(key, x.shape))
      >>> key, x = jax.random.key(0), jnp.ones((4, 2))
      >>> parts = jax.vmap(with_bits_of_rows(noise, "replica"), (None, 0), axis_name="replica")(key, x.reshape(2, 2, 2))
      >>> bool((parts.reshape(4, 2) == noise(key, x)).all())
      True
    """

    def call(*args: Any) -> Any:
        program, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
        drawn = _drawn(program)
        if not drawn:
            return function(*args)
        twice = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((2 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), args[-1])
        of_twice = _drawn(jax.make_jaxpr(function)(*args[:-1], twice))
        if len(drawn) != len(of_twice) or any(
                one != other and (2 * one[0], *one[1:]) != other for one, other in zip(drawn, of_twice, strict=True)):
            raise UnlikeDraws("what is drawn at random depends on the number of rows")
        are_of_rows = (one != other for one, other in zip(drawn, of_twice, strict=True))
        return evaluated(_with_rows_drawn(program, are_of_rows, axis_name), args, outputs)

    return call


def _drawn(program: ClosedJaxpr | Jaxpr) -> list[tuple[int, ...]]:
    """Returns the shapes of a program's random bits, in order."""
    shapes = []

    def note(equation: Any, _: Any) -> Any:
        if equation.primitive.name == "random_bits":
            shapes.append(equation.params["shape"])
        return equation

    with_equations(program, note)
    return shapes


def _with_rows_drawn(
    program: ClosedJaxpr | Jaxpr, are_of_rows: Iterator[bool], axis_name: str | tuple[str, ...]
) -> Any:
    def change(equation: Any, _: Any) -> Any:
        is_draw = equation.primitive.name == "random_bits"
        return _of_rows(equation, axis_name) if is_draw and next(are_of_rows) else equation

    return with_equations(program, change)


def _of_rows(draw: JaxprEqn, axis_name: str | tuple[str, ...]) -> Any:
    """Returns an equation that draws the bits of a replica's rows."""
    def bits(key: jax.Array) -> jax.Array:
        one, other = jax.random.key_data(key)
        halves = threefry2x32_p.bind(one, other, *_places(draw.params["shape"], lax.axis_index(axis_name)))
        return (halves[0] ^ halves[1]).astype(f"uint{draw.params['bit_width']}")

    return called(bits, draw)


def _places(shape: tuple[int, ...], replica: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the positions of a replica's numbers among the numbers of all rows, as 32 high and 32 low bits."""
    size, half = math.prod(shape[1:]), 0xFFFF
    row = replica.astype(jnp.uint32) * np.uint32(shape[0]) + jnp.arange(shape[0], dtype=jnp.uint32)
    row = row.reshape(-1, *[1] * (len(shape) - 1))
    # Product of two 32-bit numbers, by halves.
    low_by_high = (row & half) * (size >> 16) + ((row & half) * (size & half) >> 16)
    high_by_low = (row >> 16) * (size & half) + (low_by_high & half)
    high = (row >> 16) * (size >> 16) + (low_by_high >> 16) + (high_by_low >> 16)
    first = row * np.uint32(size)
    low = first + jnp.arange(size, dtype=jnp.uint32).reshape(shape[1:])
    return high + (low < first), low
