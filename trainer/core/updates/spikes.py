"""Spikes: updates whose loss or gradient norm is far above its running median. See `callbacks.SpikeGuard`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class SpikeRule(NamedTuple):
    """The definition of a spike.

    Attributes:
      window: number of applied updates in the medians; before so many, nothing is a spike.
      deviations: number of median absolute deviations above the median from which a value is a spike.
      streak: number of skipped updates in a row that the log "spike_streaks" counts; None for no such log.
    """

    window: int
    deviations: float
    streak: int | None = None


class Spikes(NamedTuple):
    """The last losses and gradient norms, in rings of `window` float32 numbers, and the number of applied updates."""

    losses: jax.Array
    norms: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states


_LEAST_SHARE = 0.01  # of the median: deviations of values that hardly change would make spikes of rounding


def first(rule: SpikeRule) -> Spikes:
    """Returns the state before the first update."""
    return Spikes(jnp.zeros(rule.window, jnp.float32), jnp.zeros(rule.window, jnp.float32), jnp.zeros((), jnp.int32))


def is_spike(rule: SpikeRule, spikes: Spikes, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns whether the loss or the gradient norm of an update is a spike, a boolean scalar.

    >>> rule = SpikeRule(3, 5.0, 2)
    >>> known = Spikes(jnp.array([1.0, 1.2, 0.9]), jnp.ones(3), jnp.int32(3))
    >>> [bool(is_spike(rule, known, jnp.float32(loss), jnp.float32(1))) for loss in (1.4, 1.6)]
    [False, True]
    """
    far = [~(value <= _limit(rule, values)) for value, values in ((loss, spikes.losses), (norm, spikes.norms))]
    return (spikes.count >= rule.window) & (far[0] | far[1])


def after(spikes: Spikes, loss: jax.Array, norm: jax.Array, is_made: jax.Array) -> Spikes:
    """Returns the state after an update, which is unchanged unless the update is made."""
    place = spikes.count % len(spikes.losses)
    made = Spikes(spikes.losses.at[place].set(loss), spikes.norms.at[place].set(norm), spikes.count + 1)
    return jax.tree.map(lambda new, old: jnp.where(is_made, new, old), made, spikes)


def _limit(rule: SpikeRule, values: jax.Array) -> jax.Array:
    median = jnp.median(values)
    deviation = jnp.median(jnp.abs(values - median))
    return median + rule.deviations * jnp.maximum(deviation, _LEAST_SHARE * jnp.abs(median))
