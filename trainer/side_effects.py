"""What a compiled function must not do: keep a traced array in something that outlives it.

A compiled function runs once, to be traced; later calls run the program only. An array that it appended to a list of
the code around it is a placeholder, of which JAX complains long after, where it is used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

_CONTAINERS = (list, tuple, set, dict)


@contextlib.contextmanager
def refused(function: Callable[..., Any]) -> Iterator[None]:
    """Raises TypeError if `function`, traced in the block, keeps an array in something that it sees from outside.

    That is a captured or global variable, a container in one, or an attribute of one or of the method's own object.
    What the functions that it calls do is not seen.
    """
    before = set(_kept(function))
    yield
    new = [name for identity, name in _kept(function).items() if identity not in before]
    if new:
        own = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"`{own}` keeps a traced array in `{new[0]}`, which outlives the step. The function is "
                        "compiled: it runs once, to be traced, and its side effects are not repeated. Return the value "
                        "instead.")


def _kept(function: Any) -> dict[int, str]:
    """Returns the name under which each traced array is kept, by the array's identity."""
    kept: dict[int, str] = {}
    for name, value in _seen(function):
        kept.update(dict.fromkeys(map(id, _tracers(value)), name))
        if not (inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value)):
            for attribute, item in list(getattr(value, "__dict__", {}).items()):
                kept.update(dict.fromkeys(map(id, _tracers(item)), f"{name}.{attribute}"))
    return kept


def _seen(function: Any) -> Iterator[tuple[str, Any]]:
    if getattr(function, "__self__", None) is not None:
        yield "self", function.__self__
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _tracers(value: Any, depth: int = 2) -> Iterator[Any]:
    if isinstance(value, jax.core.Tracer):
        yield value
    elif depth and isinstance(value, _CONTAINERS):
        for item in list(value.values() if isinstance(value, Mapping) else value):
            yield from _tracers(item, depth - 1)
