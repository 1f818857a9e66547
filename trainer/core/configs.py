"""Objects as plain data and back, in the form in which Keras serializes them.

Nothing is imported by a name that a configuration holds: objects are made of the classes and functions that the caller
knows, and of those that the user hands over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from trainer.core.errors import unknown_name, wrong_type

Config = dict[str, Any]


def to_config(value: Any, module: str) -> Any:
    """Returns an object or a function as plain data.

    Args:
      value: an object with `get_config`, or a function with a name.
      module: where its class is public in this package, such as "losses".

    Raises:
      TypeError: for anything else.

    >>> to_config(max, "losses")["config"]
    'max'
    """
    if hasattr(value, "get_config") and not isinstance(value, type):
        return {"module": f"trainer.{module}", "class_name": type(value).__name__, "config": value.get_config(),
                "registered_name": None}
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        return {"module": "builtins", "class_name": "function", "config": value.__name__,
                "registered_name": "function"}
    raise wrong_type("value", value, "an object with `get_config`, or a function with a name")


def from_config(
    kind: str, config: Any, known: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """Returns what `to_config`, or Keras's `serialize`, has made plain data of.

    Args:
      kind: what is expected, such as "loss", for errors.
      config: a dict with "class_name" and "config", or the name of a class or a function.
      known: classes and functions by name.
      custom_objects: further ones, which come first.

    Raises:
      ValueError: for an unknown name.
      TypeError: for what is no such dict, and for arguments that the class does not take.

    >>> from_config("number", {"class_name": "complex", "config": {"real": 2}}, {"complex": complex})
    (2+0j)
    """
    known = {**known, **(custom_objects or {})}
    if isinstance(config, str):
        return _named(kind, config, known)
    if not isinstance(config, Mapping) or not isinstance(config.get("class_name"), str):
        raise wrong_type("config", config, f"the configuration of a {kind}, a dict with 'class_name' and 'config', or "
                         "its name")
    if config["class_name"] == "function":
        name = config["config"]  # Keras writes a dict for functions of the user's own
        return _named(kind, name["name"] if isinstance(name, Mapping) else name, known)
    cls = _named(kind, config["class_name"], known)
    arguments = copy.deepcopy(dict(config.get("config") or {}))
    make: Callable[..., Any] | None = getattr(cls, "from_config", None)
    return cls(**arguments) if make is None else make(arguments)


def is_config(value: Any) -> bool:
    """Returns whether a value has the form of a serialized object."""
    return isinstance(value, Mapping) and "class_name" in value and "config" in value


def _named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise unknown_name(kind, name, known)
    return known[name]
