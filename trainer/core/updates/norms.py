"""Norms of gradients, updates and parameters: in all, and by top-level module. See `compile(log_norms=True)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOGS = ("grad_norm", "update_norm", "param_norm")
"""The names of the logs; a log of a module adds its name, as in "grad_norm/encoder"."""


class Norms(NamedTuple):
    """Squares of L2 norms by top-level module, of the last update; float32 scalars.

    Attributes:
      gradients: of the gradients, as the optimizer gets them.
      updates: of the optimizer's change of the parameters; zero for a skipped update.
      parameters: of the trained parameters after the update.
    """

    gradients: dict[str, jax.Array]
    updates: dict[str, jax.Array]
    parameters: dict[str, jax.Array]


def squares(tree: Any, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the sums of squares of a tree of arrays by the first part of their paths, float32 scalars.

    Args:
      tree: the arrays.
      prefix: prefix of the paths, such as "generator/".

    >>> {name: float(value) for name, value in squares({"up": {"kernel": jnp.array([3.0, 4.0])}}).items()}
    {'up': 25.0}
    """
    sums: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = prefix.partition("/")[0] or jax.tree_util.keystr(path[:1], simple=True)
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        sums.setdefault(name, []).append(jnp.sum(jnp.real(wide * jnp.conj(wide))).astype(jnp.float32))
    return {name: sum(values[1:], values[0]) for name, values in sums.items()}


def as_logs(parts: Iterable[Norms]) -> dict[str, jax.Array]:
    """Returns the logs for the norms of all optimizers' updates.

    >>> norms = Norms({"up": jnp.float32(9), "down": jnp.float32(16)}, {"up": jnp.float32(0)}, {"up": jnp.float32(1)})
    >>> [f"{name}: {float(value)}" for name, value in as_logs([norms]).items()][:3]
    ['grad_norm: 5.0', 'update_norm: 0.0', 'param_norm: 1.0']
    """
    merged = [_merged(each) for each in zip(*parts, strict=True)]
    totals = {log: jnp.sqrt(sum(each.values(), jnp.float32(0))) for log, each in zip(LOGS, merged, strict=True)}
    return totals | {f"{log}/{name}": jnp.sqrt(value) for log, each in zip(LOGS, merged, strict=True)
                     for name, value in each.items()}


def is_of_module(log: str) -> bool:
    """Returns whether a log is the norm of a single module."""
    return log.partition("/")[0] in LOGS and "/" in log


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
