"""Converts objects to plain data and back, in Keras's serialization format.

A name in a configuration never causes an import: objects are made from classes and functions that the caller knows, or
that the user has registered or passes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from trainer.core.ambient import state
from trainer.core.errors import unknown_name, wrong_type

Config = dict[str, Any]
T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0]
_registered: dict[str, Any] = {}  # classes and functions, by name


def register_keras_serializable(package: str = "Custom", name: str | None = None) -> Callable[[T], T]:
    """Registers a class or function of yours under a name for configurations.

    Args:
      package: Part of the name before `>`, such as the name of your project.
      name: Part of the name after it; by default the name of the class or function.

    Returns:
      A decorator, which returns the decorated object.

    Raises:
      TypeError: A name is no string, or the decorated object is no class or function.
      ValueError: A class has no `get_config`.

    Example:
      >>> import trainer
      >>> @register_keras_serializable("my_project")
      ... class Huber10(trainer.losses.Huber):
      ...     def __init__(self, delta=10.0, **kwargs):
      ...         super().__init__(delta, **kwargs)
      >>> trainer.losses.serialize(Huber10())["registered_name"]
      'my_project>Huber10'
      >>> trainer.losses.deserialize(trainer.losses.serialize(Huber10(20.0))).delta
      20.0

    Source: `keras.saving.register_keras_serializable`.
    """
    if not isinstance(package, str):
        raise wrong_type("package", package, "a string, as in `@register_keras_serializable(package=\"my_project\")`")
    if not isinstance(name, str | None):
        raise wrong_type("name", name, "a string or None")

    def register(value: T) -> T:
        if not callable(value) or not hasattr(value, "__name__"):
            raise wrong_type("value", value, "a class, or a function with a name")
        if isinstance(value, type) and not hasattr(value, "get_config"):
            raise ValueError(f"A class needs `get_config` to be registered, which returns its arguments as a dict. "
                             f"Received: {value.__name__}, which has none.")
        _registered[f"{package}>{name or value.__name__}"] = value
        return value

    return register


def get_custom_objects() -> dict[str, Any]:
    """Returns the dict of all registered objects by name. Entries added to it are registered.

    Source: `keras.saving.get_custom_objects`.
    """
    return _registered


class CustomObjectScope:
    """A scope in which names also refer to these classes and functions. Nested scopes add up.

    It holds in the current thread, and in threads that read data for a `fit` inside it.

    Args:
      custom_objects: Classes and functions by name; None for an empty dict.

    Raises:
      TypeError: `custom_objects` is no mapping.

    Example:
      >>> import trainer
      >>> def cubed(y_true, y_pred):
      ...     return abs(y_true - y_pred).mean(-1) ** 3
      >>> with CustomObjectScope({"cubed": cubed}):
      ...     assert trainer.losses.get("cubed") is cubed

    Source: `keras.saving.CustomObjectScope`.
    """

    def __init__(self, custom_objects: Mapping[str, Any] | None):
        if not isinstance(custom_objects, Mapping | None):
            raise wrong_type("custom_objects", custom_objects, "a dict of classes and functions by name")
        self.custom_objects = dict(custom_objects or {})
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        self._entered.append(
            state.replaced(custom_objects={**state.current().custom_objects, **self.custom_objects}))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)


custom_object_scope = CustomObjectScope
"""Keras's alias of `CustomObjectScope`."""


def get_registered_name(obj: Any) -> str:
    """Returns the registered name of a class or a function, or its own name if it is not registered.

    >>> get_registered_name(max)
    'max'

    Source: `keras.saving.get_registered_name`.
    """
    own: str = obj.__name__
    return next((name for name, value in reversed(_registered.items()) if value is obj), own)


def is_registered(value: Any) -> bool:
    """Returns whether a class or a function is registered under any name."""
    return any(registered is value for registered in _registered.values())


def get_registered_object(
    name: str, custom_objects: Mapping[str, Any] | None = None, module_objects: Mapping[str, Any] | None = None
) -> Any:
    """Returns the class or the function of a name, or None.

    Args:
      name: The name, such as "my_project>Huber10".
      custom_objects: Additional objects with the highest priority, followed by `custom_object_scope` and registered
        objects.
      module_objects: Additional objects with the lowest priority.

    >>> get_registered_object("largest", {"largest": max})
    <built-in function max>

    Source: `keras.saving.get_registered_object`.
    """
    return with_custom_objects(module_objects or {}, custom_objects).get(name)


def with_custom_objects(
    known: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns classes and functions by name: `known`, overridden by the user's objects."""
    return {**known, **_registered, **state.current().custom_objects, **(custom_objects or {})}


def to_config(value: Any, module: str) -> Any:
    """Returns an object or a function as plain data.

    Args:
      value: An object with `get_config`, or a function with a name.
      module: Public module of its class if it belongs to this package, such as "losses".

    Raises:
      TypeError: `value` is anything else.

    >>> to_config(max, "losses")["config"]
    'max'
    """
    if hasattr(value, "get_config") and not isinstance(value, type):
        cls = type(value)
        is_ours = cls.__module__.partition(".")[0] == _PACKAGE and not is_registered(cls)
        return {"module": f"{_PACKAGE}.{module}" if is_ours else None, "class_name": cls.__name__,
                "config": value.get_config(), "registered_name": None if is_ours else get_registered_name(cls)}
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        return {"module": "builtins", "class_name": "function", "config": get_registered_name(value),
                "registered_name": "function"}
    raise wrong_type("value", value, "an object with `get_config`, or a function with a name")


def from_config(
    kind: str, of: type | tuple[type, ...], config: Any, known: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the object or function of a configuration from `to_config` or Keras's `serialize`.

    Args:
      kind: Kind of the object, such as "loss", for errors.
      of: Class of the objects of this kind.
      config: A dict with "class_name" and "config", or the name of a class or a function.
      known: Classes and functions by name.
      custom_objects: Additional objects with the highest priority, followed by the user's objects; see
        `with_custom_objects`.

    Raises:
      ValueError: A name is unknown.
      TypeError: `config` is no such dict, the class does not take the arguments, or the object is of another kind.

    >>> from_config("number", complex, {"class_name": "complex", "config": {"real": 2}}, {"complex": complex})
    (2+0j)
    """
    custom = with_custom_objects({}, custom_objects)
    known = {**known, **custom}
    if isinstance(config, str):
        return _made(kind, of, _named(kind, config, known))
    if not isinstance(config, Mapping) or not isinstance(config.get("class_name"), str):
        raise wrong_type("config", config, f"the configuration of {_one(kind)}, a dict with 'class_name' and 'config', "
                         "or its name")
    if config["class_name"] == "function":
        name = config["config"]  # Keras writes a dict for user functions
        return _made(kind, of, _named(kind, name["name"] if isinstance(name, Mapping) else name, known))
    registered = config.get("registered_name")
    if registered in custom:
        cls = custom[registered]
    elif is_of_the_user(config) and config["class_name"] not in custom:
        raise ValueError(f"Unknown {kind} {registered!r}, of a class of yours. Define it before, with "
                         "`@trainer.utils.register_keras_serializable(...)`, or give it to `deserialize`: "
                         f"`custom_objects={{{config['class_name']!r}: {config['class_name']}}}`.")
    else:
        cls = _named(kind, config["class_name"], known)
    with CustomObjectScope(custom_objects):  # for nested objects
        return _made(kind, of, cls, copy.deepcopy(dict(config.get("config") or {})))


def is_of_the_user(config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration is of a class outside of this package and Keras."""
    package = str(config.get("module")).partition(".")[0]
    return config.get("registered_name") is not None and package not in (_PACKAGE, "keras", "tf_keras", "builtins")


def is_config(value: Any) -> bool:
    """Returns whether a value has the form of a serialized object."""
    return isinstance(value, Mapping) and "class_name" in value and "config" in value


def _one(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _made(kind: str, of: type | tuple[type, ...], found: Any, arguments: Config | None = None) -> Any:
    """Returns an object of the class `found` with these arguments, or `found` itself, such as a function."""
    if isinstance(found, type):
        make: Callable[..., Any] | None = getattr(found, "from_config", None)
        found = found(**arguments or {}) if make is None or arguments is None else make(arguments)
    if not isinstance(found, of) and (hasattr(found, "get_config") or not callable(found)):
        raise wrong_type("config", found, f"that of {_one(kind)}")
    return found


def _named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise unknown_name(kind, name, known)
    return known[name]
