"""The dtype that layers compute in, for Linen's and for NNX's layers that name none of their own.

Flax's layers without a `dtype` compute in the widest dtype that they meet. So one float32 array on the way makes all
that follows float32: a constant table, the initial carry of a recurrent cell, the running averages of `nnx.BatchNorm`.
Keras's layers cast what they are given; so do Flax's, once they are told a dtype.

Owns which layers are told, and what else they need then. Two kinds do:

- A recurrent cell's new carry gets the dtypes of the old one, as a loop requires. So an LSTM's memory stays float32.
- `nnx.BatchNorm` normalizes in float32, by averages that are not rounded, and has its outputs cast.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


def call_linen_layer(layer: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
                     dtype: Any) -> Any:
    """Returns what a method of a bound Linen layer returns, where `dtype` takes the place of a `dtype` of None.

    Args:
      layer: the bound layer, which Flax made for this call; it is told the dtype for good.
      call: the method, as an interceptor is given it.
      args: the method's arguments.
      kwargs: its keyword arguments.
      dtype: the dtype to compute in; None leaves the layer as it is.
    """
    if dtype is not None and _takes_dtype(layer) and not any(map(jnp.iscomplexobj, jax.tree.leaves((args, kwargs)))):
        object.__setattr__(layer, "dtype", dtype)
    outputs = call(*args, **kwargs)
    if dtype is not None and isinstance(layer, nn.RNNCellBase) and args and isinstance(outputs, tuple):
        return _with_dtypes_of(args[0], outputs[0]), *outputs[1:]
    return outputs


def set_nnx_compute_dtype(module: nnx.Module, dtype: Any) -> None:
    """Makes the layers of a private clone compute in `dtype`, except for those with a `dtype` of their own."""
    layers: list[tuple[Any, Any]] = list(nnx.iter_modules(module))
    for _, layer in layers:
        if not _takes_dtype(layer):
            continue
        if isinstance(layer, nnx.BatchNorm):
            layer.compute_dtype = dtype  # type: ignore[attr-defined]
            object.__setattr__(layer, "__class__", _output_casting_class(type(layer)))
        else:
            layer.dtype = dtype
            if isinstance(layer, nnx.RNNCellBase):
                object.__setattr__(layer, "__class__", _carry_keeping_class(type(layer)))


def _takes_dtype(layer: Any) -> bool:
    return (getattr(layer, "dtype", "absent") is None
            and not jnp.issubdtype(getattr(layer, "param_dtype", jnp.float32), jnp.complexfloating))


def _with_dtypes_of(old: Any, new: Any) -> Any:
    return jax.tree.map(lambda old_leaf, new_leaf: new_leaf.astype(old_leaf.dtype), old, new)


# One class per class: NNX compares graph definitions by it.


@functools.cache
def _output_casting_class(layer_class: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    def call(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        return layer_class.__call__(self, *args, **kwargs).astype(self.compute_dtype)

    return _with_call(layer_class, call)


@functools.cache
def _carry_keeping_class(cell_class: type[nnx.RNNCellBase]) -> type[nnx.RNNCellBase]:
    def call(self: Any, carry: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        new_carry, *outputs = cell_class.__call__(self, carry, *args, **kwargs)
        return _with_dtypes_of(carry, new_carry), *outputs

    return _with_call(cell_class, call)


def _with_call(layer_class: type[Any], call: Callable[..., Any]) -> type[Any]:
    # The signature too, by which flags are passed.
    call = functools.wraps(layer_class.__call__)(call)
    return types.new_class(layer_class.__name__, (layer_class,), exec_body=lambda body: body.update(__call__=call))
