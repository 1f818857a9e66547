"""Checks that a compiled function neither keeps traced arrays in outer objects nor reads outer values that change.

A compiled function runs once, to be traced; later calls only run the program. An array that it appends to an outer list
is a placeholder, and JAX complains only later, when it is used. An array that it reads from outer code becomes a
constant of the program: later changes are silently ignored.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from trainer.core.ambient import state

_CONTAINERS = (list, tuple, set, dict)


class Constants:
    """The versions of objects that compiled code has read; an object's `version` changes with each of its changes."""

    def __init__(self) -> None:
        self._versions: list[tuple[weakref.ref[Any], int]] = []

    def add(self, reader: object) -> None:
        """Records the current version of an object, if it has a version."""
        if isinstance(version := getattr(reader, "version", None), int):
            self._versions.append((weakref.ref(reader), version))

    @property
    def are_stale(self) -> bool:
        """Whether such an object has changed since."""
        return any((reader := found()) is not None and reader.version != version for found, version in self._versions)


@contextlib.contextmanager
def noting(constants: Constants) -> Iterator[None]:
    """Records in `constants` the objects that `check_may_read` lets the block read, which traces a function."""
    with state.replaced(read_constants=constants):
        yield


@contextlib.contextmanager
def side_effects_rejected(function: Callable[..., Any]) -> Iterator[None]:
    """Raises TypeError if `function`, traced in the block, keeps an array in an outer object.

    An outer object is a captured or global variable, a container in such a variable, or an attribute of the variable or
    of the method's own object. Functions called by `function` are not checked.
    """
    before = set(_kept(function))
    yield
    new = [name for identity, name in _kept(function).items() if identity not in before]
    if new:
        raise TypeError(f"`{_name(function)}` keeps a traced array in `{new[0]}`, which outlives the step. The "
                        "function is compiled: it runs only to be traced, and its side effects are not repeated. "
                        "Return the value instead.")


@contextlib.contextmanager
def given_its_state(function: Callable[..., Any], owner: object = None) -> Iterator[None]:
    """Makes `check_may_read` refuse reads in the block, which traces `function`: only its arguments may change.

    Args:
      function: the traced function.
      owner: the object whose own values must be arguments, while values of other objects may be read; None to refuse
        all reads.
    """
    with state.replaced(traced_function=function, traced_owner=owner):
        yield


def check_may_read(reader: object, owner: object, what: str, fix: str) -> None:
    """Raises TypeError during the trace of a function that must receive its values as arguments.

    Args:
      reader: the object that is about to read.
      owner: the object that the values belong to, such as a model.
      what: name of the values to read, for the message.
      fix: the value to pass instead.
    """
    tracing = state.current()
    traced_owner, constants = tracing.traced_owner, tracing.read_constants
    if tracing.traced_function is not None and (traced_owner is None or traced_owner is owner):
        name = _name(tracing.traced_function)
        if traced_owner is not None:  # its class may inherit the function
            name = f"{type(traced_owner).__name__}.{name.rpartition('.')[2]}"
        raise TypeError(f"`{name}` reads {what} from outside. It is compiled, and what it does not "
                        f"get as an argument is a constant of the program: later training would not be seen. {fix}")
    if constants is not None:
        constants.add(reader)


def captured(function: Callable[..., Any], is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yields the names and values that the code of `function` uses from outside and for which `is_wanted` is true.

    These are captured and global variables, items of containers in such variables, attributes of these variables or of
    the method's own object, and arguments of a `functools.partial`. Functions that it uses are searched too, if they
    are in the same file.
    """
    waiting, file = [_as_method(function)], _file(_as_method(function))
    visited: set[Any] = set()
    while waiting:
        user = waiting.pop()
        names = {name for code in _codes(user) for name in code.co_names}
        for name, value in _seen(user):
            items = [(name, value)]
            if not is_wanted(value) and _has_state(value):
                found = {each: inspect.getattr_static(value, each, None) for each in names}
                items += [(f"{name}.{each}", types.MethodType(item, value) if inspect.isfunction(item) else item)
                          for each, item in found.items()]
            for path, item in items:
                yield from ((path, each) for each in _within(item, is_wanted))
                key = _plain(item), id(getattr(item, "__self__", item))  # each access to a method creates a new object
                if not is_wanted(item) and file is not None and _file(item) is file and key not in visited:
                    visited.add(key)
                    waiting.append(item)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _kept(function: object) -> dict[int, str]:
    """Returns the names under which traced arrays are kept, by the identities of the arrays."""
    kept: dict[int, str] = {}
    for name, value in _seen(_as_method(function)):
        kept.update(dict.fromkeys(map(id, _tracers(value)), name))
        if _has_state(value):
            for attribute, item in list(getattr(value, "__dict__", {}).items()):
                kept.update(dict.fromkeys(map(id, _tracers(item)), f"{name}.{attribute}"))
    return kept


def _has_state(value: object) -> bool:
    """Returns whether a value has attributes of its own, unlike a file, a class or a function."""
    return not (inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value))


def _seen(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the outer variables of a function, by name."""
    if isinstance(function, functools.partial):
        yield from ((f"args[{index}]", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _seen(function.func)
        return
    plain = _plain(function)
    if getattr(function, "__self__", None) is not None:
        yield "self", function.__self__
    if plain is None:
        return
    if hasattr(plain, "__wrapped__"):
        yield "__wrapped__", plain.__wrapped__
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet assigned
            yield name, cell.cell_contents
    # `co_names` also has the names of attributes.
    named = {each.argval for code in _codes(function) for each in dis.get_instructions(code)
             if each.opname.endswith("_GLOBAL")}
    for name in sorted(named & plain.__globals__.keys()):
        yield name, plain.__globals__[name]


def _as_method(function: object) -> Any:
    """Returns the `__call__` method if `function` is a user's object, else `function`."""
    call = inspect.getattr_static(type(function), "__call__", None)
    return types.MethodType(call, function) if _plain(function) is None and inspect.isfunction(call) else function


def _plain(function: object) -> types.FunctionType | None:
    """Returns the Python function in a method, a partial or a compiled function, or None."""
    if isinstance(function, functools.partial):
        return _plain(function.func)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function) and not inspect.isclass(function):
        function = inspect.getattr_static(function, "__wrapped__", None)
    return function if inspect.isfunction(function) else None


def _file(function: object) -> dict[str, Any] | None:
    """Returns the globals of a function's file, also if a library wraps the function."""
    plain = _plain(function)
    return None if plain is None else getattr(inspect.unwrap(plain), "__globals__", None)


def _codes(function: object) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of functions defined in it."""
    plain = _plain(function)
    waiting = [] if plain is None else [plain.__code__]
    while waiting:
        code = waiting.pop()
        waiting.extend(each for each in code.co_consts if inspect.iscode(each))
        yield code


def has_tracers(value: object) -> bool:
    """Returns whether a value is a traced array, or a container with a traced array."""
    return any(True for _ in _tracers(value))


def _tracers(value: object) -> Iterator[Any]:
    return _within(value, lambda item: isinstance(item, jax.core.Tracer))


def _within(value: Any, is_wanted: Callable[[Any], bool], depth: int = 2) -> Iterator[Any]:
    """Yields a value if it is wanted, else the wanted items of its containers."""
    if callable(getattr(type(value), "__jax_array__", None)):  # an array-like object, such as a metric's variable
        value = value.__jax_array__()
    if is_wanted(value):
        yield value
    elif depth and isinstance(value, _CONTAINERS):
        for item in list(value.values() if isinstance(value, Mapping) else value):
            yield from _within(item, is_wanted, depth - 1)
