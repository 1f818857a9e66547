"""Batch normalization over the rows of the whole batch.

Where a step sees the whole batch, the layers of Flax compute it themselves. Owns what is needed elsewhere: statistics
over the rows of several replicas, without padding, and of single replicas; and how they get into Linen's layers.
`nnx_batch_norm.py` has NNX's. The layers' own `axis_name` is ignored, unless the module maps over that axis: the
replica context knows which replicas there are. It must not know NNX.

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

from trainer.core.errors import unknown_name
from trainer.core.replica_context import get_replica_context
from trainer.modules.base import IsFrozen

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
    features = feature_axes(axis, x.ndim)
    reduced = tuple(index for index in range(x.ndim) if index not in features)
    x = x.astype(dtype)
    counted = _counted(x, features, mask, policy)

    context = get_replica_context()

    def over_replicas(*sums: jax.Array) -> list[jax.Array]:
        packed = jnp.stack(sums)
        return list(checkpoint_name(context.sum(packed) if policy == "global" else packed, STATISTICS_NAME))

    def means(*values: jax.Array) -> list[jax.Array]:
        if counted is None:  # as many values on each replica
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
    """Returns the axes that are kept, counted from the first."""
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
    """Returns whether a layer is frozen: all of its parameters are; without parameters, whatever has its path would be.

    Args:
      path: the path of the layer, such as "encoder/BatchNorm_0".
      params: the paths of its parameters.
      is_frozen: which parameters are frozen; None if none is.

    >>> is_layer_frozen("norm", ["norm/bias", "norm/scale"], lambda path: path.endswith("bias"))
    False
    """
    return is_frozen is not None and all(map(is_frozen, list(params) or [path]))


def is_linen_batch_norm(context: nn.module.InterceptorContext) -> bool:
    """Returns whether a Linen interceptor sees the call that normalizes, also when a subclass makes it."""
    return getattr(context.orig_method, "func", None) is _LINEN_CALL


def needs_replicas(policy: str) -> bool:
    """Returns whether batch statistics are others than those of the rows that a layer is given."""
    context = get_replica_context()
    return (context.num_replicas_in_sync > 1 or context.is_padded
            or (policy == "per_replica" and context.batch_norm_groups > 1))


def mapped_axis(axis_name: str | None) -> str | None:
    """Returns the name of an axis that the module maps over itself, as by `nn.vmap`; None for any other name."""
    try:
        return None if axis_name is None or jax.lax.axis_size(axis_name) < 1 else axis_name
    except NameError:  # it is one of replicas, as other loops name them
        return None


def refuse_mapped_axis(axis_name: str | None) -> None:
    """Raises ValueError for a layer that takes its statistics over an axis of the module's own, on replicas."""
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
      mask: the `mask` that the caller gave to the layer.
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
    # It normalizes by the statistics as if they were running averages.
    for name, value in zip(("mean", "var"), used, strict=True):
        layer.put_variable("batch_stats", name, value)
    outputs = call_with_running_averages(layer, call, x)
    layer.put_variable("batch_stats", "mean", moved_average(running["mean"], mean, layer.momentum))
    layer.put_variable("batch_stats", "var", moved_average(running["var"], var, layer.momentum))
    return outputs


def statistics_and_input(
    x: jax.Array, axis: int | Sequence[int], *, dtype: Any, use_fast_variance: bool, mask: jax.Array | None,
    policy: str, epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns `(x, mean, var, used)`: normalizing `x` by `used`, a mean and a variance, is what the layer does.

    The statistics of the running averages are `mean` and `var`. With those of several replicas in one batch, `x` is
    normalized by its own already.

    Args:
      epsilon: what the layer adds to the variance.
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
    # Flags go by attributes, as Flax refuses them as arguments if the attribute is set. This is the clone that Flax
    # bound for this call, never the user's object.
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
    """Returns a running average that has seen one more value."""
    return momentum * average + (1 - momentum) * value
