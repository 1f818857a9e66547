"""JAX's functions for how arrays in a program are split over a mesh, for modules that call them.

JAX takes these on the mesh that a program is compiled for, and refuses axes that are not there or belong to the
replicas. A module names those of the mesh that it was written with. They never change a number: so what the mesh of
the strategy has is asked of it, and the rest is left out.

JAX has no way to say which mesh a module means, with 0.10.2 and 0.12. So while a module is traced, JAX's functions are
replaced in all modules that have them by their names. `TRAINER_WORKAROUNDS=0` in the environment leaves them alone;
`tests/distribute/test_sharded_modules.py` fails when JAX accepts by itself what modules say.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from trainer.core.ambient import state, workarounds

Constrain = Callable[[Any, Any], Any]
"""Returns arrays, split as shardings say that are a prefix of their tree."""

_JAX: dict[str, Any] = {"with_sharding_constraint": jax.lax.with_sharding_constraint, "reshard": jax.sharding.reshard,
                        "auto_axes": jax.sharding.auto_axes}


def over_axes(axes: Collection[str]) -> Constrain:
    """Returns a function for programs of one replica, which knows its own rows alone.

    Args:
      axes: the axes of the mesh that arrays of a replica may be split over. Others are left out of shardings.
    """
    def constrain(arrays: Any, shardings: Any) -> Any:
        if not axes:
            return arrays
        here = jax.tree.map(lambda sharding: _restricted(axes, _spec(sharding)), shardings, is_leaf=_is_sharding)
        return constrained(arrays, here)

    return constrain


def on_mesh(mesh: Mesh) -> Constrain:
    """Returns a function for programs of the whole batch: what the mesh has no axis for is left to the compiler."""
    def constrain(arrays: Any, shardings: Any) -> Any:
        specs = jax.tree.map(_spec, shardings, is_leaf=_is_sharding)
        if not any(axis in mesh.shape for spec in jax.tree.leaves(specs, is_leaf=_is_sharding) for axis in _axes(spec)):
            return arrays
        here = jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*(
            entry or PartitionSpec.UNCONSTRAINED for entry in _restricted(mesh.shape, spec)))),
            specs, is_leaf=_is_sharding)
        return constrained(arrays, here)

    return constrain


def constrained(arrays: Any, shardings: Any) -> Any:
    """Returns arrays that are split so, by JAX's own function."""
    return _JAX["with_sharding_constraint"](arrays, shardings)


def ignore(arrays: Any, shardings: Any) -> Any:
    """Returns the arrays as they are: one device has nothing to split."""
    return arrays


def _spec(sharding: Any) -> PartitionSpec:
    if isinstance(sharding, Format):
        sharding = sharding.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        # Of an array's type, which says nothing of what the compiler splits.
        return PartitionSpec(*(entry or PartitionSpec.UNCONSTRAINED for entry in sharding.spec))
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    return sharding if isinstance(sharding, PartitionSpec) else PartitionSpec()


def _is_sharding(value: Any) -> bool:
    return value is None or isinstance(value, (Format, PartitionSpec, jax.sharding.Sharding))


def _axes(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        yield from entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def _restricted(axes: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    def entry(received: Any) -> Any:
        if received is PartitionSpec.UNCONSTRAINED:
            return received
        return tuple(axis for axis in _axes(PartitionSpec(received)) if axis in axes) or None

    return PartitionSpec(*map(entry, spec))


_lock = threading.Lock()
_replaced: list[tuple[Any, str]] = []  # the modules, and the names of JAX's functions there
_blocks = 0  # how many are running, in all threads


@contextlib.contextmanager
def constraints_by(constrain: Constrain) -> Iterator[None]:
    """Has the block call `constrain` where it calls JAX's functions, by whatever module it finds them in."""
    if not workarounds.are_on():
        yield
        return
    _begin()
    try:
        with state.replaced(constrain=constrain):
            yield
    finally:
        _end()


@contextlib.contextmanager
def on_mesh_of_strategy() -> Iterator[None]:
    """Has the block, which calls a module, see the mesh of `constraints_by` around it, or else none."""
    with contextlib.nullcontext() if state.current().constrain is not None else constraints_by(ignore):
        yield


def _begin() -> None:
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _replaced.extend(
                (module, name) for module in list(sys.modules.values()) for name, function in _JAX.items()
                if getattr(module, "__dict__", {}).get(name) is function and not module.__name__.startswith("jax._src"))
            for module, name in _replaced:
                setattr(module, name, _REPLACEMENTS[name])


def _end() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        if not _blocks:
            for module, name in _replaced:
                setattr(module, name, _JAX[name])
            _replaced.clear()


@functools.wraps(_JAX["with_sharding_constraint"])
def _with_sharding_constraint(x: Any, shardings: Any) -> Any:
    return (state.current().constrain or _JAX["with_sharding_constraint"])(x, shardings)


@functools.wraps(_JAX["reshard"])
def _reshard(xs: Any, out_shardings: Any) -> Any:
    return (state.current().constrain or _JAX["reshard"])(xs, out_shardings)


@functools.wraps(_JAX["auto_axes"])
def _auto_axes(f: Any = None, /, *, axes: Any = None, out_sharding: Any = None) -> Any:
    if f is None:
        return functools.partial(_auto_axes, axes=axes, out_sharding=out_sharding)
    options = {"axes": axes} if out_sharding is None else {"axes": axes, "out_sharding": out_sharding}
    in_jax = _JAX["auto_axes"](f, **options)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        constrain = state.current().constrain
        if constrain is None:
            return in_jax(*args, **kwargs)
        given = kwargs.pop("out_sharding") if out_sharding is None else out_sharding
        return constrain(f(*args, **kwargs), given)

    return call


_REPLACEMENTS = {"with_sharding_constraint": _with_sharding_constraint, "reshard": _reshard, "auto_axes": _auto_axes}
