"""From a user's module to its functional form.

Owns the choice of the adapter.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from flax import nnx

from trainer.errors import wrong_type
from trainer.modules.base import FunctionalModule
from trainer.modules.linen import LinenFunctional
from trainer.modules.named import NamedFunctional
from trainer.modules.nnx import NNXFunctional
from trainer.modules.sequential import stack_layers


def as_functional(module: Any) -> FunctionalModule:
    """Returns the functional form of a module.

    Args:
      module: a Linen module, an NNX module, a list of layers to apply one after another, a plain function of the
        inputs, or a dict of names to any of these.

    Returns:
      A `NamedFunctional` for a dict, whose parameters are kept per name; otherwise a module without names.

    Raises:
      TypeError: `module` is none of these, or a list or dict has an item that is none of these.
      ValueError: a list or dict is empty.

    >>> import jax, jax.numpy as jnp
    >>> functional = as_functional(nn.Dense(2))
    >>> params, model_state, outputs = functional.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> params["kernel"].shape, outputs.shape
    ((3, 2), (4, 2))
    """
    if isinstance(module, nn.Module):
        return LinenFunctional(module)
    if isinstance(module, nnx.Module):
        return NNXFunctional(module)
    if isinstance(module, dict):
        return NamedFunctional({name: as_functional(part) for name, part in module.items()})
    if isinstance(module, (list, tuple)):
        return as_functional(stack_layers(module))
    if callable(module) and not isinstance(module, type):
        return as_functional(stack_layers([module]))
    raise wrong_type("module", module, "an instance of a Flax module (Linen or NNX), a list of layers, a function, "
                                       "or a dict of names to these")
