"""Objects as plain data, in the form in which Keras serializes them, and the classes and functions of the user's own.

`registry.Registry` makes objects of such data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from trainer.core.ambient import state
from trainer.core.errors import wrong_type

Config = dict[str, Any]
T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0]
_registered: dict[str, Any] = {}  # classes and functions, by name


def register_keras_serializable(package: str = "Custom", name: str | None = None) -> Callable[[T], T]:
    """Registers a custom class or function under a name for configurations.

    Args:
      package: part of the name before `>`, such as the name of your project.
      name: part of the name after it; by default the name of the class or function.

    Returns:
      A decorator, which returns the decorated object.

    Raises:
      TypeError: a name is not a string, or the decorated object is not a class or function.
      ValueError: a class has no `get_config`.

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
      custom_objects: classes and functions by name; None for an empty dict.

    Raises:
      TypeError: `custom_objects` is not a mapping.

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


def is_registered(value: object) -> bool:
    """Returns whether a class or a function is registered under any name."""
    return any(registered is value for registered in _registered.values())


def get_registered_object(
    name: str, custom_objects: Mapping[str, Any] | None = None, module_objects: Mapping[str, Any] | None = None
) -> Any:
    """Returns the class or the function of a name, or None.

    Args:
      name: the name, such as "my_project>Huber10".
      custom_objects: additional objects with the highest priority, followed by `custom_object_scope` and registered
        objects.
      module_objects: additional objects with the lowest priority.

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


def to_config(value: object, module: str) -> Config:
    """Returns an object or a function as plain data.

    Args:
      value: an object with `get_config`, or a function with a name.
      module: public module of its class if it belongs to this package, such as "losses".

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


def is_of_the_user(config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration is of a class outside of this package and Keras."""
    package = str(config.get("module")).partition(".")[0]
    return config.get("registered_name") is not None and package not in (_PACKAGE, "keras", "tf_keras", "builtins")


def is_config(value: object) -> bool:
    """Returns whether a value has the form of a serialized object."""
    return isinstance(value, Mapping) and "class_name" in value and "config" in value


def with_lists(config: Any) -> Any:
    """Returns a configuration with lists instead of arrays, as Keras writes them.

    >>> with_lists({"weights": {"class_name": "__tensor__", "config": {"value": [1.0, 2.0], "dtype": "float32"}}})
    {'weights': [1.0, 2.0]}
    """
    if isinstance(config, list):
        return [with_lists(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    if config.get("class_name") in ("__tensor__", "__numpy__"):
        return config["config"]["value"]
    return {name: with_lists(item) for name, item in config.items()}
