"""The dtype that layers compute in that name none of their own.

Flax's layers without a `dtype` compute in the widest dtype that they meet. So one float32 array on the way makes all
that follows float32: a constant table, the initial carry of a recurrent cell, the running averages of `nnx.BatchNorm`.
Keras's layers cast what they are given; so do Flax's, once they have a dtype.

Owns which layers receive a dtype, and how Linen's do; `nnx_compute_dtype.py` has NNX's. A recurrent cell needs more:
its new carry gets the dtypes of the old carry, as a loop requires. So an LSTM's memory stays float32. It must not know
NNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def call_linen_layer(layer: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
                     dtype: Any) -> Any:
    """Returns what a method of a bound Linen layer returns, where `dtype` takes the place of a `dtype` of None.

    Args:
      layer: the bound layer, which Flax made for this call; it keeps the dtype.
      call: the method, as an interceptor is given it.
      args: the method's arguments.
      kwargs: its keyword arguments.
      dtype: the dtype to compute in; None leaves the layer as it is.
    """
    if dtype is not None and takes_dtype(layer) and not any(map(jnp.iscomplexobj, jax.tree.leaves((args, kwargs)))):
        object.__setattr__(layer, "dtype", dtype)
    outputs = call(*args, **kwargs)
    if dtype is not None and isinstance(layer, nn.RNNCellBase) and args and isinstance(outputs, tuple):
        return with_dtypes_of(args[0], outputs[0]), *outputs[1:]
    return outputs


def takes_dtype(layer: Any) -> bool:
    """Returns whether a layer has a `dtype` and was given none; complex layers keep theirs."""
    return (getattr(layer, "dtype", "absent") is None
            and not jnp.issubdtype(getattr(layer, "param_dtype", jnp.float32), jnp.complexfloating))


def with_dtypes_of(old: Any, new: Any) -> Any:
    """Returns the arrays of `new` in the dtypes of those of `old`, a tree of the same structure."""
    return jax.tree.map(lambda old_leaf, new_leaf: new_leaf.astype(old_leaf.dtype), old, new)
