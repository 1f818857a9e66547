"""The compute dtype of layers without their own dtype.

Flax's layers without a `dtype` compute in the widest dtype of their inputs and parameters. So a single float32 array
makes all later layers float32: a constant table, the initial carry of a recurrent cell, the running averages of
`nnx.BatchNorm`. Keras's layers cast their inputs, and so do Flax's layers with a dtype.

Owns the choice of the layers that receive a dtype, and how Linen's layers receive it; `nnx_compute_dtype.py` covers
NNX's. The new carry of a recurrent cell also gets the dtypes of the old carry, because a loop requires it. So an LSTM's
memory stays float32. It must not know NNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from trainer.core.types import PyTree


def call_linen_layer(layer: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
                     dtype: DTypeLike | None) -> Any:
    """Calls a method of a bound Linen layer, with `dtype` in place of a `dtype` of None, and returns its result.

    Args:
      layer: the bound layer, which Flax made for this call. It keeps the dtype.
      call: the method, as an interceptor receives it.
      args: positional arguments of the method.
      kwargs: keyword arguments of the method.
      dtype: the compute dtype; None leaves the layer as it is.
    """
    if dtype is not None and takes_dtype(layer) and not has_complex((args, kwargs)):
        object.__setattr__(layer, "dtype", dtype)
    outputs = call(*args, **kwargs)
    if dtype is not None and isinstance(layer, nn.RNNCellBase) and args and isinstance(outputs, tuple):
        return with_dtypes_of(args[0], outputs[0]), *outputs[1:]
    return outputs


def takes_dtype(layer: object) -> bool:
    """Returns whether a layer has a `dtype` that is unset. Complex layers keep their dtype."""
    return (getattr(layer, "dtype", "absent") is None
            and not jnp.issubdtype(getattr(layer, "param_dtype", jnp.float32), jnp.complexfloating))


def has_complex(arguments: PyTree) -> bool:
    """Returns whether any argument of a layer is complex: a cast to a compute dtype would drop its imaginary part."""
    return any(jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.complexfloating)
               for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype") or isinstance(leaf, complex))


def with_dtypes_of(old: PyTree, new: PyTree) -> Any:
    """Returns the arrays of `new`, cast to the dtypes of `old`, a tree of the same structure."""
    return jax.tree.map(lambda old_leaf, new_leaf: new_leaf.astype(old_leaf.dtype), old, new)
