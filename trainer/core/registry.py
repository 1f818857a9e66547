"""Objects of a kind by name, and as plain data in Keras's form: losses, metrics, optimizers, schedules and penalties.

Nothing is imported by a name that a configuration holds: objects are made of the classes and functions that a registry
knows, or that the user has registered or hands over.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from trainer.core import configs
from trainer.core.errors import unknown_name, wrong_type
from trainer.core.types import keras_class

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes and functions of one kind of object, by name.

    Args:
      kind: the kind, such as "loss".
      of: the class that objects of this kind have, or several.
      module: the module of this package in which they are public, such as "losses".
      classes: classes by name; a class may have several names.
      functions: functions by name. A configuration names a class or a function; a mere name finds classes first.
      ignores_case: whether names of this package are known in any case. The names in `classes` are then in lower case.
      argument: the user's argument for such an object, in errors; `kind` by default.
      expected: valid values of that argument, in errors.

    Example:
      >>> numbers = Registry("number", complex, "numbers", {"complex": complex})
      >>> numbers.deserialize({"class_name": "complex", "config": {"real": 2}})
      (2+0j)
    """

    def __init__(
        self, kind: str, of: type | tuple[type, ...], module: str, classes: Mapping[str, Any],
        functions: Mapping[str, Any] | None = None, *, ignores_case: bool = False, argument: str | None = None,
        expected: str = "",
    ):
        self._kind, self._of, self._module = kind, of, module
        self._classes, self._functions, self._ignores_case = classes, functions or {}, ignores_case
        self._argument, self._expected = argument or kind, expected

    def get(self, identifier: object) -> Any:
        """Returns the object for a user's argument; objects, functions and None are returned unchanged.

        Args:
          identifier: a name, a configuration, a class, which is called without arguments, an object or a function.

        Raises:
          ValueError: for an unknown name.
          TypeError: for anything else, such as a metric of Keras, which is callable and keeps state.
        """
        if isinstance(identifier, str) or configs.is_config(identifier):
            return self.deserialize(identifier)
        if keras_class(identifier, "Metric"):
            raise self.wrong(identifier)
        if isinstance(identifier, type) and issubclass(identifier, self._of):
            return identifier()
        if identifier is None or (callable(identifier) and not isinstance(identifier, type)):
            return identifier
        raise self.wrong(identifier)

    def wrong(self, received: object) -> TypeError:
        """Returns the error for an argument that neither is an object of this kind nor stands for such an object.

        For an object or a class of Keras, it names the class of this package.
        """
        error = wrong_type(self._argument, received, self._expected)
        theirs = keras_class(received)
        if theirs is None:
            return error
        cls = received if isinstance(received, type) else type(received)
        kinds = self._of if isinstance(self._of, tuple) else (self._of,)
        known = {each.__name__ for each in (*self._classes.values(), *kinds) if isinstance(each, type)}
        ours = f"`trainer.{self._module}.{theirs.__name__}`" if theirs.__name__ in known else (
            f"a class of `trainer.{self._module}`")
        advice = f"Use {ours}" if cls is theirs else f"Derive {cls.__name__} from {ours}"
        return TypeError(f"{error} It is Keras's. {advice}.")

    def serialize(self, value: object) -> configs.Config:
        """Returns an object or a function as plain data.

        Raises:
          TypeError: for anything else.
        """
        return configs.to_config(value, self._module)

    def deserialize(self, config: object, custom_objects: Mapping[str, Any] | None = None) -> T:
        """Returns the object or the function for plain data from `serialize`, or from Keras's function.

        Args:
          config: a dict with "class_name" and "config", or the name of a class or a function.
          custom_objects: further classes and functions, which come first; then the user's, see
            `configs.with_custom_objects`.

        Raises:
          ValueError: for an unknown name.
          TypeError: for a value that is not such a dict, for arguments that the class does not take, for an object of
            another kind.
        """
        custom = configs.with_custom_objects({}, custom_objects)
        if isinstance(config, str):
            return self._made(self._named(config, custom))
        if not isinstance(config, Mapping) or not isinstance(config.get("class_name"), str):
            raise wrong_type("config", config, f"the configuration of {self._one}, a dict with 'class_name' and "
                             "'config', or its name")
        if config["class_name"] == "function":
            name = config["config"]  # Keras writes a dict for functions of the user's own
            name = name["name"] if isinstance(name, Mapping) else name
            return self._made(self._named(name, {**self._functions, **custom}))
        registered = config.get("registered_name")
        if registered in custom:
            cls = custom[registered]
        elif configs.is_of_the_user(config) and config["class_name"] not in custom:
            raise ValueError(f"Unknown {self._kind} {registered!r}, of a class of yours. Define it before, with "
                             "`@trainer.utils.register_keras_serializable(...)`, or give it to `deserialize`: "
                             f"`custom_objects={{{config['class_name']!r}: {config['class_name']}}}`.")
        else:
            cls = self._named(config["class_name"], custom)
        with configs.CustomObjectScope(custom_objects):  # for nested configurations
            return self._made(cls, configs.with_lists(copy.deepcopy(dict(config.get("config") or {}))))

    def _named(self, name: str, custom: Mapping[str, Any]) -> Any:
        """Returns the class or the function of a name."""
        known = {**self._functions, **self._classes, **custom}
        if self._ignores_case and name not in custom:
            name = name.lower()
        if name not in known:
            raise unknown_name(self._kind, name, known)
        return known[name]

    def _made(self, found: Any, arguments: configs.Config | None = None) -> T:
        """Returns an object of a class with these arguments, or a function that was found."""
        if isinstance(found, type):
            from_config = getattr(found, "from_config", None)
            found = (found(**arguments or {}) if from_config is None or arguments is None
                     else from_config(arguments))
        if not isinstance(found, self._of) and (hasattr(found, "get_config") or not callable(found)):
            raise wrong_type("config", found, f"the configuration of {self._one}")
        made: T = found
        return made

    @property
    def _one(self) -> str:
        return f"{'an' if self._kind[0] in 'aeiou' else 'a'} {self._kind}"
