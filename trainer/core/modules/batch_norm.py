"""Batch normalization over the rows of the whole batch.

Flax's own layers compute the statistics in steps that see the whole batch. This file owns all other cases: statistics
over the rows of several replicas, without padding, or of single replicas, and how Linen's layers use them.
`nnx_batch_norm.py` covers NNX's layers. The `axis_name` of a layer is ignored, unless the module maps over that axis:
the replica context knows the replicas. It must not know NNX.

Statistics follow Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, as Flax computes them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from trainer.core.errors import unknown_name
from trainer.core.modules.base import IsFrozen
from trainer.core.replica_context import get_replica_context

STATISTICS_NAME = "batch_statistics"
"""Name of the sums over the batch in `jax.checkpoint` policies."""

POLICIES = ("global", "per_replica")
"""Batch statistics over the rows of all replicas, or of each replica."""

_LINEN_CALL = inspect.unwrap(nn.BatchNorm.__call__)


def batch_statistics(x: jax.Array, axis: int | Sequence[int], *, dtype: DTypeLike | None, use_fast_variance: bool,
                     mask: jax.Array | None, policy: str) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance over the real rows of a batch.

    Args:
      x: this replica's batch. Axis 0 is the rows, or the items of each row in sequence.
      axis: the feature axis or axes, which are kept.
      dtype: dtype of the sums and of the result.
      use_fast_variance: whether to compute `E[x^2] - E[x]^2`, with one exchange between replicas, instead of
        `E[(x - E[x])^2]`, with two.
      mask: True where `x` counts, broadcastable to `x`; None if all of it counts.
      policy: "global" or "per_replica". With "per_replica", a replica without real rows uses its padding.

    Raises:
      ValueError: `policy` is unknown, or the batch is padded and the layer's input does not have its rows along axis 0.
    """
    if policy not in POLICIES:
        raise unknown_name("batch_norm", policy, POLICIES)
    features = feature_axes(axis, x.ndim)
    reduced = tuple(index for index in range(x.ndim) if index not in features)
    x = x.astype(dtype)
    counted = _counted(x, features, mask, policy)

    context = get_replica_context()

    def over_replicas(*sums: jax.Array) -> list[jax.Array]:
        packed = jnp.stack(sums)
        return list(checkpoint_name(context.sum(packed) if policy == "global" else packed, STATISTICS_NAME))

    def means(*values: jax.Array) -> list[jax.Array]:
        if counted is None:  # equal counts on all replicas
            count: Any = math.prod(x.shape[index] for index in reduced)
            count *= context.num_replicas_in_sync if policy == "global" else 1
            sums = over_replicas(*(each.sum(reduced) for each in values))
        else:
            count, *sums = over_replicas(*(
                jnp.sum(each, reduced, where=counted) for each in (jnp.ones_like(x), *values)))
        return [each / count for each in sums]

    if use_fast_variance:
        mean, square = means(x, jnp.square(x))
        return mean, jnp.maximum(square - jnp.square(mean), 0)  # rounding can make the difference negative
    mean, = means(x)
    variance, = means(jnp.square(x - jnp.expand_dims(mean, reduced)))
    return mean, variance


def feature_axes(axis: int | Sequence[int], ndim: int) -> set[int]:
    """Returns the feature axes as non-negative indices."""
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


def is_layer_frozen(path: str, params: Iterable[str], is_frozen: IsFrozen | None) -> bool:
    """Returns whether all parameters of a layer are frozen, or its path if it has no parameters.

    Args:
      path: path of the layer, such as "encoder/BatchNorm_0".
      params: paths of its parameters.
      is_frozen: whether a path is frozen; None if no path is.

    >>> is_layer_frozen("norm", ["norm/bias", "norm/scale"], lambda path: path.endswith("bias"))
    False
    """
    return is_frozen is not None and all(map(is_frozen, list(params) or [path]))


def is_linen_batch_norm(context: nn.module.InterceptorContext) -> bool:
    """Returns whether a Linen interceptor sees `nn.BatchNorm`'s own `__call__`, also through a subclass."""
    return getattr(context.orig_method, "func", None) is _LINEN_CALL


def needs_replicas(policy: str) -> bool:
    """Returns whether batch statistics differ from the plain statistics of the rows that a layer receives."""
    context = get_replica_context()
    return (context.num_replicas_in_sync > 1 or context.is_padded
            or (policy == "per_replica" and context.batch_norm_groups > 1))


def mapped_axis(axis_name: str | None) -> str | None:
    """Returns the name of an axis that the module itself maps over, as with `nn.vmap`; None for any other name."""
    try:
        return None if axis_name is None or jax.lax.axis_size(axis_name) < 1 else axis_name
    except NameError:  # an axis of replicas, as other loops name them
        return None


def refuse_mapped_axis(axis_name: str | None) -> None:
    """Raises ValueError, on replicas, for a layer with statistics over an axis that the module maps over."""
    if axis_name is not None:
        raise ValueError(f"BatchNorm takes its statistics over the axis {axis_name!r}, which the module maps over. "
                         "Where replicas have parts of the batch, it cannot: use it in a step of `fit`, with "
                         '`batch_norm="global"`.')


def call_linen_batch_norm(layer: nn.BatchNorm, call: Callable[..., jax.Array], x: jax.Array, mask: jax.Array | None,
                          policy: str) -> jax.Array:
    """Normalizes `x` in training, and writes the layer's running averages.

    Args:
      layer: the bound layer.
      call: its own `__call__`.
      x: this replica's batch.
      mask: the `mask` argument of the layer's call.
      policy: "global" or "per_replica".
    """
    axis_name = mapped_axis(layer.axis_name)
    if not needs_replicas(policy):
        with _attributes(layer, use_running_average=False, axis_name=axis_name):
            return call(x, mask=mask)
    refuse_mapped_axis(axis_name)
    wide = jnp.float32 if layer.force_float32_reductions else x.dtype
    x, mean, var, used = statistics_and_input(
        x, layer.axis, dtype=jnp.promote_types(layer.dtype or x.dtype, wide),
        use_fast_variance=layer.use_fast_variance, mask=mask, policy=policy, epsilon=layer.epsilon)
    running: dict[str, jax.Array] = {name: layer.get_variable("batch_stats", name) for name in ("mean", "var")}
    # The layer normalizes by the statistics as if they were running averages.
    for name, value in zip(("mean", "var"), used, strict=True):
        layer.put_variable("batch_stats", name, value)
    outputs = call_with_running_averages(layer, call, x)
    layer.put_variable("batch_stats", "mean", moved_average(running["mean"], mean, layer.momentum))
    layer.put_variable("batch_stats", "var", moved_average(running["var"], var, layer.momentum))
    return outputs


def statistics_and_input(
    x: jax.Array, axis: int | Sequence[int], *, dtype: DTypeLike | None, use_fast_variance: bool,
    mask: jax.Array | None, policy: str, epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns `(x, mean, var, used)`. The layer normalizes `x` by `used`, a pair of mean and variance.

    `mean` and `var` update the running averages. If the batch holds the rows of several replicas, `x` is already
    normalized by the statistics of each replica.

    Args:
      epsilon: the layer's `epsilon`, added to the variance.
      **others: see `batch_statistics`.
    """
    groups = get_replica_context().batch_norm_groups if policy == "per_replica" else 1
    if groups == 1:
        mean, var = batch_statistics(
            x, axis, dtype=dtype, use_fast_variance=use_fast_variance, mask=mask, policy=policy)
        return x, mean, var, (mean, var)
    features = feature_axes(axis, x.ndim)
    if 0 in features or x.shape[0] % groups:
        raise ValueError(f"BatchNorm cannot tell the rows of {groups} replicas in its input of shape {x.shape}. "
                         "Expected: the rows, or each row's items one after another, along axis 0. Make the batch the "
                         "first axis, or compile with `batch_norm=\"global\"`.")

    def of_replicas(array: jax.Array) -> jax.Array:
        return array.reshape(groups, -1, *array.shape[1:])

    def statistics(x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return batch_statistics(x, axis, dtype=dtype, use_fast_variance=use_fast_variance, mask=mask, policy=policy)

    masks = None if mask is None else of_replicas(jnp.broadcast_to(mask, x.shape))
    means, variances = jax.vmap(statistics)(of_replicas(x), masks)  # (groups, features)
    shape = (groups, *[size if index in features else 1 for index, size in enumerate(x.shape)])
    own = (of_replicas(x) - means.reshape(shape)) * jax.lax.rsqrt(variances.reshape(shape) + epsilon)
    mean, var = means.mean(0), variances.mean(0)
    return own.reshape(x.shape).astype(x.dtype), mean, var, (jnp.zeros_like(mean), jnp.ones_like(var) - epsilon)


@contextlib.contextmanager
def _attributes(layer: nn.BatchNorm, **values: Any) -> Iterator[None]:
    # Flags are set as attributes, because Flax refuses them as arguments if the attribute is set. The layer is the
    # clone that Flax bound for this call, never the user's object.
    given = {name: getattr(layer, name) for name in values}
    for name, value in values.items():
        object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        for name, value in given.items():
            object.__setattr__(layer, name, value)


def call_with_running_averages(layer: nn.BatchNorm, call: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Normalizes `x` by the running averages of a bound layer, whatever its flags say; `call` is its `__call__`."""
    with _attributes(layer, use_running_average=True):
        return call(x)


def moved_average(average: jax.Array, value: jax.Array, momentum: float) -> jax.Array:
    """Returns a running average updated with one value."""
    return momentum * average + (1 - momentum) * value
