"""NNX's BatchNorm layers with statistics over the whole batch, or over each replica's rows.

Owns how the layers use the statistics of `batch_norm.py`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype

from trainer.core.modules.batch_norm import (
    feature_axes,
    mapped_axis,
    moved_average,
    needs_replicas,
    refuse_mapped_axis,
    statistics_and_input,
)


class _ReplicaBatchNorm(nnx.BatchNorm):
    """Replaces `nnx.BatchNorm` in private clones; the attributes are set on each instance."""

    policy: str
    is_frozen: bool

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *,
                 mask: jax.Array | None = None) -> jax.Array:
        if self.is_frozen or (self.use_running_average if use_running_average is None else use_running_average):
            return super().__call__(x, use_running_average=True)
        axis_name = self.axis_name
        if not needs_replicas(self.policy):
            object.__setattr__(self, "axis_name", mapped_axis(axis_name))
            try:
                return super().__call__(x, use_running_average=False, mask=mask)
            finally:
                object.__setattr__(self, "axis_name", axis_name)
        refuse_mapped_axis(mapped_axis(axis_name))
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, _, scale, bias = self.promote_dtype((x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype)
        x, mean, var, used = statistics_and_input(
            x, self.axis, dtype=jnp.promote_types(self.dtype or x.dtype, jnp.float32),
            use_fast_variance=self.use_fast_variance, mask=mask, policy=self.policy, epsilon=self.epsilon)
        self.mean[...] = moved_average(self.mean[...], mean, self.momentum)
        self.var[...] = moved_average(self.var[...], var, self.momentum)
        mean, var = used

        features = feature_axes(self.axis, x.ndim)
        shape = [size if index in features else 1 for index, size in enumerate(x.shape)]
        factor = jax.lax.rsqrt(var + self.epsilon)
        outputs = x - mean.reshape(shape)
        outputs *= (factor if scale is None else factor * scale).reshape(shape)
        if bias is not None:
            outputs += bias.reshape(shape)
        given = [value for value in (x, scale, bias) if value is not None]
        return outputs.astype(canonicalize_dtype(*given, dtype=self.dtype))


def replace_nnx_batch_norms(module: nnx.Module) -> None:
    """Replaces the classes of all `nnx.BatchNorm` layers in a private clone, so that `set_nnx_policy` applies to them.

    A subclass that overrides `__call__` keeps its override; `super()` leads to the replacement.
    """
    for _, layer in list(nnx.iter_modules(module)):
        if isinstance(layer, nnx.BatchNorm):
            object.__setattr__(layer, "__class__", _replica_class(type(layer)))


def params_of_nnx_batch_norms(module: nnx.Module) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Returns the paths of the layers replaced by `replace_nnx_batch_norms`, each with the paths of its parameters."""
    params = [path for path, value in nnx.to_flat_state(nnx.state(module)) if isinstance(value, nnx.Param)]
    return {layer: [path for path in params if path[:len(layer)] == layer]
            for layer, found in nnx.iter_modules(module) if isinstance(found, _ReplicaBatchNorm)}


def set_nnx_policy(module: nnx.Module, policy: str, frozen: Container[tuple[Any, ...]]) -> None:
    """Sets the statistics for training in the layers replaced by `replace_nnx_batch_norms`.

    Args:
      module: a private clone.
      policy: "global" or "per_replica", the rows of the statistics.
      frozen: paths of layers that use their running averages instead, and do not update them.
    """
    for path, layer in list(nnx.iter_modules(module)):
        if isinstance(layer, _ReplicaBatchNorm):
            layer.policy, layer.is_frozen = policy, path in frozen


def restore_nnx_batch_norms(module: nnx.Module) -> None:
    """Undoes `replace_nnx_batch_norms` and `set_nnx_policy`."""
    for _, layer in list(nnx.iter_modules(module)):
        if isinstance(layer, _ReplicaBatchNorm):
            for name in ("policy", "is_frozen"):
                delattr(layer, name)
            object.__setattr__(layer, "__class__", _replaced_by(type(layer)))


def _replaced_by(replica_class: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    bases = replica_class.__bases__
    return nnx.BatchNorm if bases == (_ReplicaBatchNorm,) else bases[0]


@functools.cache
def _replica_class(layer_class: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    # A single replacement per class: NNX compares graph definitions by class.
    bases = (_ReplicaBatchNorm,) if layer_class is nnx.BatchNorm else (layer_class, _ReplicaBatchNorm)
    return types.new_class(layer_class.__name__, bases)
