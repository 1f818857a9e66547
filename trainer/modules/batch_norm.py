"""Batch normalization over the real rows of the whole global batch, for Linen's and for NNX's layers alike.

Owns the statistics and how they get into the layers. One replica and many take the same path, so that the layer
computes the same numbers on any number of devices. The layers' own `axis_name` is ignored: the replica context knows
which replicas there are.

Statistics follow Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, as Flax computes them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax.ad_checkpoint import checkpoint_name

from trainer.errors import unknown_name
from trainer.replica import get_replica_context

STATISTICS_NAME = "batch_statistics"
"""The name that `jax.checkpoint` policies know the sums over the batch by."""

POLICIES = ("global", "per_replica")
"""Whose rows batch statistics are taken over."""

_LINEN_CALL = inspect.unwrap(nn.BatchNorm.__call__)


def batch_statistics(x: jax.Array, axis: int | Sequence[int], *, dtype: Any, use_fast_variance: bool,
                     mask: jax.Array | None, policy: str) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance over the real rows of a batch.

    Args:
      x: this replica's batch; axis 0 is the rows, or each row's items one after another.
      axis: the feature axis or axes, which are kept.
      dtype: what the sums are computed in, and the dtype of the result.
      use_fast_variance: `E[x^2] - E[x]^2`, in one exchange between replicas, instead of `E[(x - E[x])^2]`, in two.
      mask: true where `x` counts, broadcastable to `x`; None if all of it does.
      policy: "global" or "per_replica". A replica without real rows uses its padding in the latter.

    Raises:
      ValueError: `policy` is unknown, or the batch is padded and the rows of `x` cannot be told.
    """
    if policy not in POLICIES:
        raise unknown_name("batch_norm", policy, POLICIES)
    features = _feature_axes(axis, x.ndim)
    reduced = tuple(index for index in range(x.ndim) if index not in features)
    x = x.astype(dtype)
    counted = _counted(x, features, mask, policy)

    def masked_sum(values: jax.Array) -> jax.Array:
        return jnp.sum(values, axis=reduced, where=counted)

    def over_replicas(*sums: jax.Array) -> jax.Array:
        packed = jnp.stack(sums)
        return checkpoint_name(get_replica_context().sum(packed) if policy == "global" else packed, STATISTICS_NAME)

    count = masked_sum(jnp.ones_like(x))
    if use_fast_variance:
        count, total, squares = over_replicas(count, masked_sum(x), masked_sum(jnp.square(x)))
        mean = total / count
        # Rounding can make the difference negative.
        return mean, jnp.maximum(squares / count - jnp.square(mean), 0)
    count, total = over_replicas(count, masked_sum(x))
    mean = total / count
    deviations, = over_replicas(masked_sum(jnp.square(x - jnp.expand_dims(mean, reduced))))
    return mean, deviations / count


def _feature_axes(axis: int | Sequence[int], ndim: int) -> set[int]:
    return {index % ndim for index in (axis if isinstance(axis, Sequence) else (axis,))}


def _counted(x: jax.Array, features: set[int], mask: jax.Array | None, policy: str) -> jax.Array | None:
    real_rows = get_replica_context().padding_mask
    mask = None if mask is None else jnp.asarray(mask, bool)
    if real_rows is None:
        return mask
    rows = real_rows.shape[0]
    if 0 in features or x.shape[0] % rows:
        raise ValueError(f"BatchNorm cannot tell the {rows} rows of a padded batch in its input of shape {x.shape}. "
                         "Expected: the rows, or each row's items one after another, along axis 0. Make the batch the "
                         "first axis, or use a batch size that divides the number of rows.")
    real_rows = real_rows > 0
    if policy == "per_replica":
        real_rows = real_rows | ~real_rows.any()
    counted = jnp.repeat(real_rows, x.shape[0] // rows).reshape(-1, *[1] * (x.ndim - 1))
    return counted if mask is None else counted & mask


def is_linen_batch_norm(context: nn.module.InterceptorContext) -> bool:
    """Returns whether a Linen interceptor sees the call that normalizes, also when a subclass makes it."""
    return getattr(context.orig_method, "func", None) is _LINEN_CALL


def call_linen_batch_norm(layer: nn.BatchNorm, call: Callable[..., jax.Array], x: jax.Array, mask: jax.Array | None,
                          policy: str) -> jax.Array:
    """Normalizes `x` in training, and writes the layer's running averages.

    Args:
      layer: the bound layer.
      call: its own `__call__`, which is made to use the batch's statistics as if they were running averages.
      x: this replica's batch.
      mask: the `mask` that the caller gave to the layer.
      policy: "global" or "per_replica".
    """
    wide = jnp.float32 if layer.force_float32_reductions else x.dtype
    mean, var = batch_statistics(x, layer.axis, dtype=jnp.promote_types(layer.dtype or x.dtype, wide),
                                 use_fast_variance=layer.use_fast_variance, mask=mask, policy=policy)
    running: dict[str, jax.Array] = {name: layer.get_variable("batch_stats", name) for name in ("mean", "var")}
    layer.put_variable("batch_stats", "mean", mean)
    layer.put_variable("batch_stats", "var", var)
    # The flag goes by the attribute, as Flax refuses it as an argument if the attribute is set. This is the clone that
    # Flax bound for this call, never the user's object.
    given = layer.use_running_average
    object.__setattr__(layer, "use_running_average", True)
    try:
        outputs = call(x)
    finally:
        object.__setattr__(layer, "use_running_average", given)
    layer.put_variable("batch_stats", "mean", _moved(running["mean"], mean, layer.momentum))
    layer.put_variable("batch_stats", "var", _moved(running["var"], var, layer.momentum))
    return outputs


class _ReplicaBatchNorm(nnx.BatchNorm):
    """Takes the place of `nnx.BatchNorm` in private clones; `policy` is set on each instance."""

    policy: str

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *,
                 mask: jax.Array | None = None) -> jax.Array:
        if self.use_running_average if use_running_average is None else use_running_average:
            return super().__call__(x, use_running_average=True)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, _, scale, bias = self.promote_dtype((x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype)
        mean, var = batch_statistics(x, self.axis, dtype=jnp.promote_types(self.dtype or x.dtype, jnp.float32),
                                     use_fast_variance=self.use_fast_variance, mask=mask, policy=self.policy)
        self.mean[...] = _moved(self.mean[...], mean, self.momentum)
        self.var[...] = _moved(self.var[...], var, self.momentum)

        features = _feature_axes(self.axis, x.ndim)
        shape = [size if index in features else 1 for index, size in enumerate(x.shape)]
        factor = jax.lax.rsqrt(var + self.epsilon)
        outputs = x - mean.reshape(shape)
        outputs *= (factor if scale is None else factor * scale).reshape(shape)
        if bias is not None:
            outputs += bias.reshape(shape)
        given = [value for value in (x, scale, bias) if value is not None]
        return outputs.astype(canonicalize_dtype(*given, dtype=self.dtype))


def replace_nnx_batch_norms(module: nnx.Module) -> None:
    """Makes each `nnx.BatchNorm` in a private clone take its statistics over replicas, by a policy to be set.

    A subclass that overrides `__call__` keeps it: what it reaches by `super()` is replaced.
    """
    for _, layer in list(nnx.iter_modules(module)):
        if isinstance(layer, nnx.BatchNorm):
            object.__setattr__(layer, "__class__", _replica_class(type(layer)))


def set_nnx_policy(module: nnx.Module, policy: str) -> None:
    """Sets whose rows the layers replaced by `replace_nnx_batch_norms` take their statistics over."""
    for _, layer in list(nnx.iter_modules(module)):
        if isinstance(layer, _ReplicaBatchNorm):
            layer.policy = policy


@functools.cache
def _replica_class(layer_class: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    # One class per class: NNX compares graph definitions by it.
    bases = (_ReplicaBatchNorm,) if layer_class is nnx.BatchNorm else (layer_class, _ReplicaBatchNorm)
    return types.new_class(layer_class.__name__, bases)


def _moved(average: jax.Array, value: jax.Array, momentum: float) -> jax.Array:
    return momentum * average + (1 - momentum) * value
