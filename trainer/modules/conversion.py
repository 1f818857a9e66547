"""From a user's module to its functional form.

Owns the choice of the adapter, and of the stack that a list of layers becomes. What needs NNX is imported where an NNX
module was given: `flax.nnx` is a large part of the time that importing the trainer would take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn

from trainer.core.errors import wrong_type
from trainer.modules.base import FunctionalModule
from trainer.modules.linen import LinenFunctional
from trainer.modules.named import NamedFunctional
from trainer.modules.nnx_types import is_nnx_module
from trainer.modules.plain_callables import check_holds_no_weights
from trainer.modules.sequential import linen_stack


def as_functional(module: Any) -> FunctionalModule:
    """Returns the functional form of a module.

    Args:
      module: a Linen module, an NNX module, a list of layers to apply one after another, a plain function of the
        inputs, or a dict of names to any of these.

    Returns:
      A `NamedFunctional` for a dict, whose parameters are kept per name; otherwise a module without names.

    Raises:
      TypeError: `module` is none of these, or a list or dict has an item that is none of these, such as a callable
        object that holds arrays.
      ValueError: a list or dict is empty.

    >>> import jax, jax.numpy as jnp
    >>> functional = as_functional(nn.Dense(2))
    >>> params, model_state, outputs = functional.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> params["kernel"].shape, outputs.shape
    ((3, 2), (4, 2))
    """
    if isinstance(module, nn.Module):
        return LinenFunctional(module)
    if is_nnx_module(module):
        # Not at the top: it imports `flax.nnx`.
        from trainer.modules.nnx import NNXFunctional

        return NNXFunctional(module)
    if isinstance(module, dict):
        return NamedFunctional({name: as_functional(part) for name, part in module.items()})
    if isinstance(module, (list, tuple)):
        return as_functional(_stack(module))
    if callable(module) and not isinstance(module, type):
        check_holds_no_weights(module, "`module`")
        return as_functional(_stack([module]))
    raise wrong_type("module", module, "an instance of a Flax module (Linen or NNX), a list of layers, a function, "
                                       "or a dict of names to these")


def _stack(layers: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Returns an NNX module of NNX layers, else a Linen module."""
    if not layers:
        raise ValueError("A stack needs at least one layer. Received: an empty list.")
    for index, layer in enumerate(layers):
        if isinstance(layer, type):
            raise TypeError(f"Layer {index} must be an instance. Received: the class {layer.__name__}. "
                            f"Call it: {layer.__name__}(...).")
        if not callable(layer):
            raise TypeError(f"Layer {index} must be a Flax layer or a function. Received: a value of type "
                            f"{type(layer).__name__}.")
        if not isinstance(layer, nn.Module) and not is_nnx_module(layer):
            check_holds_no_weights(layer, f"Layer {index}")
    has_nnx = any(map(is_nnx_module, layers))
    if has_nnx and any(isinstance(layer, nn.Module) for layer in layers):
        raise TypeError("A stack must have either Linen or NNX layers. Received: both. Use layers of one kind.")
    if not has_nnx:
        return linen_stack(layers)
    # Not at the top: it imports `flax.nnx`.
    from trainer.modules.nnx_sequential import nnx_stack

    return nnx_stack(layers)
