"""Compiles. The only file that calls `jax.jit` or `shard_map`, and the only one that donates.

Owns no knowledge of what it compiles: a phase of `fit`, a user's function for `strategy.run`, or an initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


def compiled(function: Callable[..., Any]) -> Any:
    """Returns `function` compiled; inside another compiled function, one whose trace is shared by all its calls."""
    return jax.jit(function)


def compiled_over_mesh(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()
) -> Any:
    """Returns a compiled function that runs `function` once per device of a mesh.

    Args:
      function: what one device computes, from its part of the arguments.
      mesh: the devices.
      in_specs: how each argument is split over the mesh, a prefix of their trees.
      out_specs: how the outputs are put together, likewise.
      donate: the numbers of the arguments whose buffers the outputs may take.
    """
    # Without the check of varying axes: with it, gradients of replicated parameters come summed already, and Flax's
    # recurrent layers fail in their scan.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=tuple(donate))


def init_placed(init: Callable[..., Any], sharding: Any, *args: Any) -> Any:
    """Returns `init(*args)` with every leaf made where `sharding` says, in a buffer of its own."""
    return jax.jit(init, out_shardings=sharding)(*args)


@jax.jit
def copy_buffers(tree: Any) -> Any:
    """Returns a copy of a tree of arrays: no leaf shares a buffer with another, or with the original."""
    return jax.tree.map(jnp.copy, tree)


def run_once(function: Callable[..., Any], *args: Any, eager: bool) -> Any:
    """Returns `function(*args)`, compiled for this one call unless it is to run eagerly."""
    return (function if eager else jax.jit(function))(*args)
