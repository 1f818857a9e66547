"""JAX's sharding constraints, for modules that call them.

JAX applies a constraint on the mesh of the program, and refuses axes that the mesh lacks or that belong to the
replicas. A module names the axes of the mesh that it was written for. Constraints never change a number: axes of the
strategy's mesh are constrained, and other axes are left out.

With JAX 0.10.2 and 0.12, a module cannot name its mesh. So while a module is traced, JAX's functions are replaced in
all Python modules that have them under their names. `TRAINER_WORKAROUNDS=0` in the environment leaves them alone;
`tests/distribute/test_sharded_modules.py` fails when JAX itself accepts the constraints of modules.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from trainer.core.ambient import state, workarounds
from trainer.core.types import PyTree

Constrain = Callable[[Any, Any], Any]
"""Returns arrays split by shardings, a prefix of their tree."""

_JAX: dict[str, Any] = {"with_sharding_constraint": jax.lax.with_sharding_constraint, "reshard": jax.sharding.reshard,
                        "auto_axes": jax.sharding.auto_axes}


def over_axes(axes: Collection[str]) -> Constrain:
    """Returns a function for programs of a single replica, which knows only its own rows.

    Args:
      axes: mesh axes that may split the arrays of a replica. Other axes are left out of shardings.
    """
    def constrain(arrays: Any, shardings: Any) -> Any:
        if not axes:
            return arrays
        here = jax.tree.map(lambda sharding: _restricted(axes, _spec(sharding)), shardings, is_leaf=_is_sharding)
        return constrained(arrays, here)

    return constrain


def on_mesh(mesh: Mesh) -> Constrain:
    """Returns a function for programs of the whole batch. Axes that the mesh lacks are left to the compiler."""
    def constrain(arrays: Any, shardings: Any) -> Any:
        specs = jax.tree.map(_spec, shardings, is_leaf=_is_sharding)
        if not any(axis in mesh.shape for spec in jax.tree.leaves(specs, is_leaf=_is_sharding) for axis in _axes(spec)):
            return arrays
        here = jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*(
            entry or PartitionSpec.UNCONSTRAINED for entry in _restricted(mesh.shape, spec)))),
            specs, is_leaf=_is_sharding)
        return constrained(arrays, here)

    return constrain


def constrained(arrays: PyTree, shardings: Any) -> Any:
    """Returns the arrays with these shardings, by JAX's own function."""
    return _JAX["with_sharding_constraint"](arrays, shardings)


def ignore(arrays: PyTree, shardings: Any) -> Any:
    """Returns the arrays unchanged: a single device has nothing to split."""
    return arrays


def _spec(sharding: Any) -> PartitionSpec:
    if isinstance(sharding, Format):
        sharding = sharding.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        # The type of an array, which does not restrict the compiler.
        return PartitionSpec(*(entry or PartitionSpec.UNCONSTRAINED for entry in sharding.spec))
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    return sharding if isinstance(sharding, PartitionSpec) else PartitionSpec()


def _is_sharding(value: object) -> bool:
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
_replaced: list[tuple[ModuleType, str]] = []  # Python modules, and the names of JAX's functions in them
_blocks = 0  # number of running blocks, in all threads
_TRAINER = os.path.dirname(sys.modules["trainer"].__file__ or "")  # elsewhere if it is installed to be edited
_PACKAGES = (_TRAINER, *{sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_searched: set[str] = set()  # names of modules of installed packages
_uses_in_packages: list[tuple[ModuleType, str]] = []


@contextlib.contextmanager
def constraints_by(constrain: Constrain) -> Iterator[None]:
    """Calls `constrain` in place of JAX's functions in the block, whichever Python module they are called from."""
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
    """Runs the block, which calls a module, on the mesh of the surrounding `constraints_by`, or on no mesh."""
    with contextlib.nullcontext() if state.current().constrain is not None else constraints_by(ignore):
        yield


def _begin() -> None:
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _replaced.extend(_uses())
            for module, name in _replaced:
                setattr(module, name, _REPLACEMENTS[name])


def _uses() -> list[tuple[ModuleType, str]]:
    """Returns the Python modules that have JAX's functions under their names, and those names.

    The thousands of modules of installed packages are searched once. A user's own may import more at any time.
    """
    uses = []
    for path in sys.modules.keys() - _searched:
        module = sys.modules.get(path)
        if module is None:  # an import that is refused
            continue
        names = getattr(module, "__dict__", {})
        found = [(module, name) for name, function in _JAX.items()
                 if names.get(name) is function and not path.startswith("jax._src")]
        if _is_installed(names.get("__spec__")):
            _searched.add(path)
            _uses_in_packages.extend(found)
        else:
            uses += found
    return uses + _uses_in_packages


def _is_installed(spec: ModuleSpec | None) -> bool:
    if spec is None or getattr(spec, "_initializing", False):  # a script, or a module that is still being imported
        return False
    return spec.origin is not None and (not spec.has_location or spec.origin.startswith(_PACKAGES))


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
