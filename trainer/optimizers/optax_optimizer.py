"""Optimizers from plain optax transformations, with bit-for-bit unchanged updates until the rate is set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import MAX_ITEMS
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.optimizers.base import Optimizer, OptimizerState
from trainer.optimizers.evaluation_params import with_slow_params
from trainer.optimizers.extra_arguments import update_with
from trainer.optimizers.optax_learning_rate import adds_gradients, find_learning_rate, stage_names


def from_optax(transformation: optax.GradientTransformation, variables: Mapping[Any, Any] | None = None) -> Optimizer:
    """Wraps an optax transformation as an optimizer.

    The optimizer has the learning rate of the transformation, if it can be found. A rate held by
    `optax.inject_hyperparams` is set in its state. Any other rate is set by scaling the final updates: by the ratio of
    the new rate to the original rate, or by a factor of the schedule. A rate that is unknown, or not equivalent to such
    a scaling, cannot be set.

    Args:
      transformation: the transformation.
      variables: the parameters of an NNX module, for labels and masks that are an `nnx.State`; see `taking_dicts`.

    Example:
      >>> float(from_optax(optax.adam(0.25)).learning_rate)
      0.25
    """
    found = find_learning_rate(transformation)
    if adds_gradients(transformation):
        warnings.warn(f"The optax transformation {', '.join(stage_names(transformation))} has no learning rate, and "
                      "adds gradients to the weights, so that the loss rises. A rate at the end of a chain also "
                      "subtracts: `optax.chain(..., optax.scale_by_learning_rate(1e-3))`.",
                      stacklevel=user_stacklevel())
    made: Optimizer
    if found is not None and found.injected:
        made = _InjectedOptimizer(transformation, found.value)
    elif found is not None and found.scales_updates:
        made = _ScaledOptimizer(transformation, found.value)
    else:
        made = _FixedOptimizer(transformation, None if found is None else found.value)
    if variables:
        from trainer.optimizers.nnx_states import taking_dicts  # imports NNX, which is slow

        made.transformation = taking_dicts(made.transformation, variables)
    return made


class _OptaxOptimizer(Optimizer):
    def __init__(self, transformation: optax.GradientTransformation, learning_rate: Any):
        names = stage_names(transformation)
        super().__init__(with_slow_params(transformation) if "lookahead" in names else transformation, learning_rate,
                         "optax")
        self._kind = ", ".join(names)

    @property
    def kind(self) -> str:
        return self._kind

    def __repr__(self) -> str:
        return f"optax({self._kind})"

    def init(self, params: PyTree) -> OptimizerState:
        try:
            return super().init(params)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            shown = ", ".join(list(named_leaves(params))[:MAX_ITEMS])
            raise ValueError(
                f"`optimizer`, the optax transformation {self.kind}, cannot begin with this model's parameters: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}. Labels and masks of optax must have the "
                f"structure of the trained parameters, or of the start of it: nested dicts, here with {shown}. A "
                "function of labels receives these dicts.") from error

    def schedule_count(self, state: OptimizerState) -> jax.Array:
        # A transformation that skips or accumulates updates counts only the updates that it makes.
        counts = [node.count for node in jax.tree.leaves(state.inner, is_leaf=_counts) if _counts(node)]
        return counts[0] if counts else state.count


class _FixedOptimizer(_OptaxOptimizer):
    """A transformation whose rate, or rates, cannot be set or are unknown."""

    def __init__(self, transformation: optax.GradientTransformation, learning_rate: Any):
        super().__init__(transformation, 1.0 if learning_rate is None else learning_rate)
        self._is_known = learning_rate is not None

    def _transform(
        self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        return update_with(self.transformation, grads, state.inner, params, extra)

    def rate_at(self, count: jax.Array, stored: Any) -> jax.Array:
        if not self._is_known:
            raise self._error("is not known")
        return super().rate_at(count, stored)

    def _as_stored(self, count: jax.Array, value: Any) -> float:
        raise self._error("cannot be set" if self._is_known else "is not known")

    def _error(self, what: str) -> ValueError:
        return ValueError(f"The learning rate of this optax transformation ({self.kind}) {what}: there may be several, "
                          "or none that scales all of its updates. Build what holds the rate with, for example, "
                          "`optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`, which is read and set in its "
                          "state, or give the transformation a schedule.")


class _ScaledOptimizer(_OptaxOptimizer):
    """A transformation with a built-in rate; another rate scales its updates."""

    def __init__(self, transformation: optax.GradientTransformation, learning_rate: Any):
        super().__init__(transformation, learning_rate)
        self._base = self._initial

    def _transform(
        self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        updates, inner = update_with(self.transformation, grads, state.inner, params, extra)
        factor = state.learning_rate / jnp.asarray(self._base, jnp.float32)  # exactly 1 until the rate is set
        return jax.tree.map(lambda update: (update * factor).astype(update.dtype), updates), inner


class _InjectedOptimizer(_OptaxOptimizer):
    """A transformation that reads its rate from a state of `optax.inject_hyperparams`."""

    def _transform(
        self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        # Every update copies the rate in the optimizer's state to the transformation's state.
        inner = jax.tree.map(lambda node: _with_rate(node, state.learning_rate), state.inner, is_leaf=_holds_rate)
        return update_with(self.transformation, grads, inner, params, extra)


def _counts(node: object) -> bool:
    return isinstance(node, (optax.ScaleByScheduleState, optax.schedules.InjectStatefulHyperparamsState))


def _holds_rate(node: object) -> bool:
    return isinstance(node, optax.schedules.InjectStatefulHyperparamsState) and "learning_rate" in node.hyperparams


def _with_rate(node: Any, rate: jax.Array) -> Any:
    if not _holds_rate(node):
        return node
    rate = rate.astype(node.hyperparams["learning_rate"].dtype)
    return node._replace(hyperparams={**node.hyperparams, "learning_rate": rate})
