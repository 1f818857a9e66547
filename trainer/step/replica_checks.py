"""Whether code of the user's computes on several replicas what it computes on one device, tried on a few rows.

A step, or a loss, may do with the rows of its replica whatever it likes. Only where that is a mean over rows, or asks
the other replicas, are the numbers those of one device. So before the first step compiles, some rows of the first batch
are computed by one replica and by several, which `jax.vmap` simulates. Random streams give them numbers that do not
depend on how many are drawn. Code that asks for the number of its replica differs between replicas on purpose, and
cannot be compared.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compile.jit import run_once
from trainer.core import replica_context
from trainer.core.errors import see
from trainer.core.replica_context import ReduceOp, ReplicaContext
from trainer.core.rng import equal_draws_key
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.distribute.replica.collectives import MeshReplicaContext
from trainer.metrics.base import MetricValue
from trainer.step.output_checks import LEAVE_OUT_PADDING, LEAVE_OUT_PADDING_IN_MODULE
from trainer.step.running_logs import check_logs, merge_over_replicas
from trainer.step.step_metrics import traced_metrics

PADS = "only pad a batch, whose rows do not divide by the replicas (or microbatches)"

_ACCUMULATED = "what the metric of the log"
_AXIS = "simulated_replica"
_ROWS = 8
_GATHER = ("For pairs of rows, let it see those of all replicas: put `@trainer.distribute.on_global_batch` above "
           "`compute_loss`, or above the function that `train_step` computes the loss with, or use "
           "`trainer.distribute.get_replica_context().all_gather(value)`.")

_GATHER_IN_MODULE = (
    "Let the module use the rows of all replicas: with `context = trainer.distribute.get_replica_context()`, "
    "`context.all_reduce(\"mean\", value)` or `context.all_gather(value)`.")
_CHANGED_GRADIENTS = (
    " Code that changes gradients, by their norm or sign for example, needs those of the whole batch: `grads = context."
    "all_reduce(\"mean\", grads)` before it, and `state.apply_gradients(grads, reduce=None)`.")


class Recording(ReplicaContext):
    """Notes what a step does, and makes no update: that would be the costly part to compile.

    Attributes:
      draws_equal: whether draws of random numbers have the same value for each row, on each replica.
      is_random: whether replicas differ on purpose.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.draws_equal = True
        self.is_random = False
        self.gradients: list[Any] = []

    @property
    def replica_id_in_sync_group(self) -> Any:
        self.is_random = True
        return super().replica_id_in_sync_group

    def random_key(self, seed: int | jax.Array, stream: str, step: int | jax.Array) -> jax.Array:
        return equal_draws_key(seed, stream, step) if self.draws_equal else super().random_key(seed, stream, step)

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        reduced = super().reduce_gradients(reduce_op, grads)
        self.gradients.append(reduced)
        return reduced

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        return params, opt_state


class _Alone(Recording):
    """The only replica."""


class _OneOfSeveral(Recording, MeshReplicaContext):
    """One of several replicas that `jax.vmap` simulates."""

    def __init__(self, rows: int, replicas: int, row_mask: jax.Array | None = None):
        super().__init__(_AXIS, replicas, False, rows, row_mask)


class _OnePart(_Alone):
    """One of several parts of a batch whose code cannot ask the others, as those of several workers.

    BatchNorm alone asks them here: its statistics may be those of a part, and all else is then compared.
    """

    def __init__(self, rows: int, parts: int):
        super().__init__(rows)
        self._module = _ModuleOfPart(self, rows, parts)

    def for_module(self) -> ReplicaContext:
        return self._module


class _ModuleOfPart(_OneOfSeveral):
    def __init__(self, part: _OnePart, rows: int, parts: int):
        super().__init__(rows, parts)
        self._part = part

    def random_key(self, seed: int | jax.Array, stream: str, step: int | jax.Array) -> jax.Array:
        return self._part.random_key(seed, stream, step)

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree, options: Any = None) -> Any:
        return value

    def all_gather(self, value: PyTree, axis: int = 0) -> Any:
        return value


def some_rows(batch: Any, replicas: int) -> Any | None:
    """Returns as many rows of a host batch as can be compared, a multiple of `replicas`; None if it has too few."""
    available = jax.tree.leaves(batch)[0].shape[0]
    if available < replicas:
        return None
    rows = max(min(_ROWS, available) // replicas, 1) * replicas
    return jax.tree.map(lambda leaf: leaf[:rows], batch)


def check_step(
    overridden: Sequence[str], step: Callable[..., Any], state: TrainState, batch: Any, replicas: int, rtol: float,
    sees_others: bool = True,
) -> None:
    """Raises ValueError if a step has other logs or gradients on several replicas than on one; warns of logs alone.

    Args:
      overridden: the names of the methods that are overridden; without any, it is for what the module sows.
      step: a train step, or a test step.
      state: the state.
      batch: what `some_rows` returned.
      replicas: how many replicas there are.
      rtol: the relative difference that rounding may make.
      sees_others: whether replicas can ask each other; workers cannot. The step has the mean of their gradients then.
    """
    outcome = functools.partial(_outcome, overridden, step)
    alone, several, is_random = compared(outcome, state, batch, replicas, _OneOfSeveral if sees_others else _OnePart)
    if sees_others:
        found = {what: values[0] for what, values in several.items()}
    else:  # accumulators of metrics are of the rows that each has, in any case
        alone = {what: value for what, value in alone.items() if not what.startswith(_ACCUMULATED)}
        found = {what: several[what].mean(0) for what in alone}
    others = [] if is_random else _different(alone, found, rtol)

    fix = _GATHER if overridden else _GATHER_IN_MODULE

    def message(what: str) -> str:
        numbers = _numbers(alone[what], found[what])
        if not sees_others:
            return (f"{_called(overridden)} cannot be used with `backup_workers`, which gives each worker a part of "
                    f"the batch. For {jax.tree.leaves(batch)[0].shape[0]} rows, the mean of {what} over {replicas} "
                    f"parts is not that of the batch{numbers}. Make it a mean over rows, or use `backup_workers=0`.")
        return (f"{_called(overridden)} has other numbers on {replicas} replicas than on one device. For "
                f"{jax.tree.leaves(batch)[0].shape[0]} rows, {what} differs{numbers}. On each replica it gets the rows "
                "of that replica. There, a loss or a log must be a mean over rows, or what a metric accumulates from "
                f"rows. {fix}{_CHANGED_GRADIENTS if _is_gradient(what) else ''}")

    _report(alone, others, message)


def check_module(
    apply: Callable[..., Any], state: TrainState, batch: Any, rtol: float, sees_others: bool = True
) -> None:
    """Raises ValueError if a module's outputs for a row depend on which rows it has beside it.

    Args:
      apply: returns the module's outputs, from the state and a batch.
      state: the state.
      batch: as many rows of a host batch as two replicas have: a module may want a certain number of them.
      rtol: the relative difference that rounding may make.
      sees_others: see `check_step`.
    """
    def outcome(state: TrainState, context: Recording, batch: Any) -> dict[str, Any]:
        return {path: leaf for path, leaf in named_leaves(apply(state, batch)).items()
                if jnp.shape(leaf)[:1] == (context.rows,) and jnp.issubdtype(leaf.dtype, jnp.inexact)}

    def equal(path: str, value: Any) -> bool:
        found = several.get(path)
        return found is not None and found.size == value.size and is_close(value, found.reshape(value.shape), rtol)

    alone, several, is_random = compared(outcome, state, batch, 2, _OneOfSeveral if sees_others else _OnePart)
    if not is_random and not all(equal(path, value) for path, value in alone.items()):
        if not sees_others:
            raise ValueError("The module computes a row's outputs from other rows of the batch, as a mean over rows "
                             "does. With `backup_workers`, each worker has a part of them, and would have other "
                             "outputs than one device. Use `backup_workers=0`.")
        raise ValueError(
            "The module computes a row's outputs from other rows of the batch, as a mean over rows does. On several "
            "replicas (or microbatches) each sees its own rows, and has other outputs than one device. Let the module "
            "see those of all: with `context = trainer.distribute.get_replica_context()`, it can use "
            "`context.all_gather(value)` or `context.all_reduce(\"mean\", value)`. Or use "
            f"`trainer.distribute.OneDeviceStrategy`. Flax's BatchNorm needs none of this. {see('other-rows')}")


def check_padding(
    overridden: Sequence[str], step: Callable[..., Any], state: TrainState | None, batch: Any, replicas: int,
    rtol: float,
) -> None:
    """Raises ValueError if a padded batch has other logs or gradients than its real rows have on one device.

    As in `check_step`, it warns where only logs differ.

    Args:
      overridden: the names of the methods that are overridden; without any, it is for what the module sows.
      step: a train step, or a test step.
      state: the state; None if it is not at hand.
      batch: a host batch.
      replicas: how many replicas there are.
      rtol: the relative difference that rounding may make.
    """
    if state is None or jax.tree.leaves(batch)[0].shape[0] < 2:
        return
    outcome = functools.partial(_outcome, overridden, step)
    alone, one, other, is_random = compared_when_padded(outcome, state, batch, replicas)
    fix = LEAVE_OUT_PADDING if overridden else LEAVE_OUT_PADDING_IN_MODULE
    _report(one, _different(one, other, 1e-5), lambda what: (
        f"{_called(overridden)} counts rows that {PADS}: {what} depends on them. {fix}"))
    others = [] if is_random else _different(alone, one, rtol)
    _report(one, others, lambda what: (
        f"{_called(overridden)} leaves out rows that {PADS}, but does not weigh the others as one device does: {what} "
        f"differs{_numbers(alone[what], one[what])}. Replicas have different numbers of real rows then. "
        f"{fix}"))


def _numbers(expected: Any, found: Any) -> str:
    return "" if np.size(expected) != 1 else f": {np.ravel(found)[0]:.4g} instead of {np.ravel(expected)[0]:.4g}"


def _called(overridden: Sequence[str]) -> str:
    return f"The overridden `{', '.join(overridden)}`" if overridden else "A loss that the module sows"


def _report(found: Mapping[str, Any], others: list[str], message: Callable[[str], str]) -> None:
    """Raises ValueError for what differs, by name; warns where gradients were compared, and only logs differ."""
    if others and any(map(_is_gradient, found)) and not any(map(_is_gradient, others)):
        warnings.warn(f"{message(others[0])} The gradients are those of one device, and the training is not another.",
                      stacklevel=2)
    elif others:
        raise ValueError(message(others[0]))


def _is_gradient(what: str) -> bool:
    return what.startswith("the gradient of ")


def compared(
    outcome: Callable[..., dict[str, Any]], state: TrainState, batch: Any, replicas: int,
    make_context: Callable[[int, int], Recording] = _OneOfSeveral,
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Returns what a function gives on one replica, and on each of several, stacked; and whether it is random.

    Args:
      outcome: a function of the state, the context of a replica and its batch.
      state: the state.
      batch: a host batch, whose rows divide by the replicas.
      replicas: how many replicas there are.
      make_context: returns the context of one of them, from its rows and their number.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    parts = jax.tree.map(lambda leaf: leaf.reshape(replicas, rows // replicas, *leaf.shape[1:]), batch)
    return _tried(outcome, state, batch, lambda run: jax.vmap(
        lambda part: run(make_context(rows // replicas, replicas), part), axis_name=_AXIS)(parts))


def compared_when_padded(
    outcome: Callable[..., dict[str, Any]], state: TrainState, batch: Any, replicas: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]:
    """Returns what a function gives for real rows on one device, and for these on several replicas, padded in two ways.

    As a fourth it returns whether the function is random.

    Args:
      outcome: see `compared`; so are the others, but that `batch` may have any number of rows above 1.
      state: see `outcome`.
      batch: see `outcome`.
      replicas: see `outcome`.
    """
    available = jax.tree.leaves(batch)[0].shape[0]
    each = max(_ROWS // replicas, 2)
    real = each * replicas - 1
    padded = np.stack([np.append(np.arange(real) % available, row) for row in (0, 1)])  # differ in the padding alone
    variants = jax.tree.map(lambda leaf: leaf[padded].reshape(2, replicas, each, *leaf.shape[1:]), batch)
    masks = (np.arange(each * replicas) < real).astype(np.float32).reshape(replicas, each)
    alone, several, is_random = _tried(
        outcome, state, jax.tree.map(lambda leaf: leaf[padded[0, :real]], batch),
        lambda run: jax.vmap(lambda variant: jax.vmap(
            lambda part, mask: run(_OneOfSeveral(each, replicas, mask), part), axis_name=_AXIS)(variant, masks)
        )(variants))
    one, other = ({what: values[number, 0] for what, values in several.items()} for number in (0, 1))
    return alone, one, other, is_random


def _tried(
    outcome: Callable[..., dict[str, Any]], state: TrainState, batch: Any,
    on_several: Callable[[Callable[[Recording, Any], dict[str, Any]]], dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Returns what a function gives for a batch on one replica, and what `on_several` makes of it; and if it is random.

    Args:
      outcome: takes the state, a context and a batch.
      state: the state.
      batch: the batch of one replica.
      on_several: takes `outcome` as a function of a context and a batch, and calls it as several replicas would.
    """
    def tried(draws_equal: bool) -> tuple[dict[str, Any], dict[str, Any], bool]:
        is_random = False

        def run(state: TrainState, context: Recording, batch: Any) -> dict[str, Any]:
            nonlocal is_random
            context.draws_equal = draws_equal
            with replica_context.enter(context):
                found = outcome(state, context, batch)
            is_random |= context.is_random
            return found

        def both(state: TrainState) -> Any:
            alone = run(state, _Alone(jax.tree.leaves(batch)[0].shape[0]), batch)
            return alone, on_several(functools.partial(run, state))

        return *jax.device_get(run_once(both, state, eager=False)), is_random

    with contextlib.suppress(Exception):  # some code takes keys of JAX's own kind only, as `jax.random.poisson` does
        return tried(draws_equal=True)
    return tried(draws_equal=False)


def _outcome(
    overridden: Sequence[str], step: Callable[..., Any], state: TrainState, context: Recording, batch: Any,
) -> dict[str, Any]:
    """Returns a step's logs and the gradients that it reduces."""
    with traced_metrics() as metrics:
        returned = step(state, batch)
    logs = returned[0] if isinstance(returned, tuple) else returned
    merged, _ = merge_over_replicas(check_logs(metrics.finished(logs), ", ".join(overridden)), [], context)
    found = {}
    for log, value in merged.items():
        is_metric = isinstance(value, MetricValue)
        found[f"{_ACCUMULATED} {log!r} has accumulated" if is_metric else f"the log {log!r}"] = (
            jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in value.variables]) if is_metric else value)
    for grads in context.gradients:
        found |= {f"the gradient of {path!r}": leaf for path, leaf in named_leaves(grads).items()}
    return found


def _different(expected: Mapping[str, Any], found: Mapping[str, Any], rtol: float) -> list[str]:
    """Returns the names of what differs."""
    # Some gradients are rounding alone, such as that of a bias before BatchNorm.
    rounding = 1e-5 * max((np.abs(value).max(initial=0) for what, value in expected.items() if _is_gradient(what)),
                          default=0.0)
    return [what for what, value in expected.items()
            if not is_close(value, found[what], rtol, rounding if _is_gradient(what) else 0.0)]


def is_close(expected: Any, found: Any, rtol: float, atol: float = 0.0) -> bool:
    """Returns whether arrays differ by rounding alone, relative to their largest number; integers not at all."""
    expected, found = np.asarray(expected), np.asarray(found)
    if not np.issubdtype(expected.dtype, np.inexact):
        return bool((expected == found).all())
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    scale = max(np.abs(expected).max(initial=0), np.abs(found).max(initial=0)) if expected.size else 0.0
    return bool(np.allclose(expected, found, rtol=0, atol=rtol * scale + atol + 1e-6, equal_nan=True))
