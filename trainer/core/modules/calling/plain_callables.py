"""Separates functions of their inputs from callables with weights that no step would train.

It knows no other library: it looks for arrays, and for the usual attributes of layers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from flax import linen as nn

from trainer.core.modules.calling.nnx_types import is_nnx_object

_WEIGHTS = ("trainable_variables", "trainable_weights", "variables", "weights", "parameters")
"""Attributes that list the weights of other libraries' layers, also before they have any."""

_PLAIN = (type(None), type, str, bytes, int, float, complex, types.ModuleType, types.FunctionType,
          types.BuiltinFunctionType)
"""Types of values without weights."""

_CONSTANT = "holds_only_constants"
"""Attribute of callables whose arrays are constants, such as preprocessing layers: nothing of them is trained."""

_NOT_A_LAYER = "not_a_layer"
"""Attribute of callables that do not belong in a model: a sentence that says where they do, with "{}" for the class."""

_DEPTH = 5  # maximum depth of nested objects


def check_holds_no_weights(function: object, what: str) -> None:
    """Raises TypeError for a callable with weights that is not a Flax module, or one that does not belong in a model.

    Nothing would train the weights. A function may close over arrays, and a `functools.partial` may hold arrays as
    arguments: these are constants.

    Args:
      function: a callable that is not a Flax module.
      what: name of the callable in the message, such as "`module`".
    """
    if (instead := getattr(type(function), _NOT_A_LAYER, None)) is not None:
        name = type(function).__name__
        raise TypeError(f"{what} must be a Flax module (Linen or NNX) or a function of its inputs. Received: a {name}. "
                        f"{instead.format(name)}")
    for held, name in _weights(function, "", _DEPTH, set()):
        raise TypeError(
            f"{what} must be a Flax module (Linen or NNX) or a function. Received: a {type(function).__name__}, which "
            f"holds {held}{f' in `{name}`' if name else ''} that would not be trained. Make it a Flax module, or, if "
            "it is a constant, pass a function that calls it: `lambda x: layer(x)`.")


def _weights(value: object, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yields descriptions of the weights in an object, with their names."""
    value = _unwrapped(value)
    if depth == 0 or id(value) in seen or isinstance(value, _PLAIN) or getattr(type(value), _CONSTANT, False):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module) or is_nnx_object(value):
        yield "a Flax module", name
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield "an array", name
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _weights(item, f"{name}[{key!r}]", depth - 1, seen)
    else:
        listed = next((weights for weights in _WEIGHTS if callable(value) and hasattr(value, weights)), None)
        if listed is not None:
            yield f"`{listed}`", name
        for key, item in _attributes(value).items():
            yield from _weights(item, f"{name}.{key}".lstrip("."), depth - 1, seen)


def _unwrapped(value: Any) -> Any:
    """Returns the object behind partial applications, bound methods and decorators such as `jax.jit`."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__self__
        elif callable(value) and not isinstance(value, (type, nn.Module)) and "__wrapped__" in getattr(
                value, "__dict__", {}):
            value = value.__wrapped__
        else:
            return value


def _attributes(value: object) -> dict[str, Any]:
    """Returns the attributes of an object, including attributes of its class and `__slots__`, without methods."""
    attributes: dict[str, Any] = {}
    for part in reversed(type(value).__mro__):
        for key, item in vars(part).items():
            if isinstance(item, types.MemberDescriptorType):
                attributes[key] = getattr(value, key, None)
            elif not key.startswith("__") and not hasattr(type(item), "__get__"):
                attributes[key] = item
    return {**attributes, **getattr(value, "__dict__", {})}
