"""The compute dtype of NNX layers without their own dtype.

Applies the choices of `compute_dtype.py`. Two kinds of layers need more than a dtype: recurrent cells, and
`nnx.BatchNorm`, which normalizes in float32, by unrounded averages, before its outputs are cast. All of them keep their
own dtype for complex inputs, as Linen's layers do: a cast would drop the imaginary parts.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from trainer.core.modules.compute_dtype import has_complex, takes_dtype, with_dtypes_of


def set_nnx_compute_dtype(module: nnx.Module, dtype: DTypeLike | None) -> None:
    """Makes the layers of a private clone compute in `dtype`, except for layers with their own `dtype`."""
    layers: list[tuple[Any, Any]] = list(nnx.iter_modules(module))
    for _, layer in layers:
        if not takes_dtype(layer):
            continue
        if isinstance(layer, nnx.BatchNorm):
            layer.compute_dtype = dtype  # type: ignore[attr-defined]
            object.__setattr__(layer, "__class__", _output_casting_class(type(layer)))
        else:
            layer.dtype = dtype
            layer_class: type[nnx.Module] = type(layer)
            if callable(layer):
                object.__setattr__(layer, "__class__", _complex_keeping_class(layer_class))
            if isinstance(layer, nnx.RNNCellBase):
                object.__setattr__(layer, "__class__", _carry_keeping_class(type(layer)))


# A single replacement per class: NNX compares graph definitions by class.


@functools.cache
def _output_casting_class(layer_class: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    def call(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        outputs = layer_class.__call__(self, *args, **kwargs)
        return outputs if jnp.iscomplexobj(outputs) else outputs.astype(self.compute_dtype)

    return _with_call(layer_class, call)


@functools.cache
def _complex_keeping_class(layer_class: type[nnx.Module]) -> type[nnx.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_complex((args, kwargs)):
            return layer_class.__call__(self, *args, **kwargs)
        # Not by NNX, which forbids changes of a layer inside of its transformations.
        dtype = self.dtype
        object.__setattr__(self, "dtype", None)
        try:
            return layer_class.__call__(self, *args, **kwargs)
        finally:
            object.__setattr__(self, "dtype", dtype)

    return _with_call(layer_class, call)


@functools.cache
def _carry_keeping_class(cell_class: type[nnx.RNNCellBase]) -> type[nnx.RNNCellBase]:
    def call(self: Any, carry: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        new_carry, *outputs = cell_class.__call__(self, carry, *args, **kwargs)
        return with_dtypes_of(carry, new_carry), *outputs

    return _with_call(cell_class, call)


def _with_call(layer_class: type[Any], call: Callable[..., Any]) -> type[Any]:
    # Keeps the signature, which decides the flags to pass.
    call = functools.wraps(layer_class.__call__)(call)
    return types.new_class(layer_class.__name__, (layer_class,), exec_body=lambda body: body.update(__call__=call))
