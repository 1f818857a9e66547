"""Mesh axes that a traced program names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from trainer.core.compile.traces.equations import with_equations


def named_axes(program: ClosedJaxpr | Jaxpr) -> set[str]:
    """Returns the mesh axes that shardings, collectives and mapped functions of a program name.

    Example:
      >>> import jax
      >>> from jax.sharding import Mesh
      >>> mesh = Mesh([jax.devices()[:1]], ("replica", "sequence"))
      >>> split = NamedSharding(mesh, PartitionSpec("sequence"))
      >>> named_axes(jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(2 * x, split))(jax.numpy.ones(4)))
      {'sequence'}
    """
    found: set[str] = set()

    def note(equation: Any, _: Any) -> Any:
        # A function that is mapped over an axis need not split anything over it.
        found.update(_named([value for name, value in equation.params.items() if name != "newly_manual_axes"]))
        return equation

    with_equations(program, note, {})
    return found


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a layout or a partition spec.

    >>> axes_of_entry(None), axes_of_entry("model"), axes_of_entry(("replica", "model"))
    ((), ('model',), ('replica', 'model'))
    """
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, NamedSharding):
        yield from _named(value.spec)
    elif isinstance(value, (tuple, list, set, frozenset, PartitionSpec)):
        for part in value:
            yield from _named(part)
