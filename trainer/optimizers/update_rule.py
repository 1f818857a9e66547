"""UpdateRule: the complete update of a model's parameters from gradients.

Owns the model's additions to an optimizer: frozen parameters, the moving average, and the treatment of non-finite
gradients. It is pure, and independent of replicas and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax

from trainer.core import arguments, configs, precision, tree_paths
from trainer.core.errors import wrong_type
from trainer.core.identity import ComparesByConfiguration
from trainer.core.types import PyTree
from trainer.core.updates import norms, spikes
from trainer.optimizers.base import Optimizer, OptimizerState
from trainer.optimizers.evaluation_params import evaluation_params, keeps_averages, map_averages


class LossScaleOptimizer(ComparesByConfiguration):
    """An optimizer that sets the first value and the growth of the loss scale of `compile(precision="mixed_float16")`.

    With that precision, gradients are also scaled without this class: the scale starts at 2**15, and doubles after 2000
    updates with finite gradients. An update with non-finite gradients is skipped and halves the scale.

    Args:
      inner_optimizer: the optimizer.
      initial_scale: scale before the first update; above 0.
      dynamic_growth_steps: number of updates with finite gradients after which the scale doubles.
      name: name of the optimizer.

    Raises:
      TypeError: if `inner_optimizer` is not an optimizer.
      ValueError: if `initial_scale` is not above 0, or `dynamic_growth_steps` is below 1.

    Source: `keras.optimizers.LossScaleOptimizer`.

    Example:
      >>> from trainer import optimizers
      >>> optimizer = LossScaleOptimizer(optimizers.SGD(0.5), initial_scale=1024.0)
      >>> float(UpdateRule(optimizer, scales_gradients=True).init({"w": jnp.ones(())}).loss_scale.scale)
      1024.0
    """

    def __init__(
        self, inner_optimizer: Optimizer, initial_scale: float = precision.INITIAL_SCALE,
        dynamic_growth_steps: int = precision.GROWTH_STEPS, name: str | None = None,
    ):
        if not isinstance(inner_optimizer, Optimizer):
            raise wrong_type("inner_optimizer", inner_optimizer, "an optimizer such as `trainer.optimizers.Adam()`")
        arguments.require_positive(initial_scale=initial_scale)
        arguments.check_count("dynamic_growth_steps", dynamic_growth_steps, 1)
        self.inner_optimizer = inner_optimizer
        self.initial_scale = float(initial_scale)
        self.dynamic_growth_steps = dynamic_growth_steps
        self.name = name or "loss_scale_optimizer"
        arguments.require_text(name=self.name)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Leaves weights out of the inner optimizer's weight decay; see `Optimizer.exclude_from_weight_decay`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments as plain data."""
        return {"name": self.name, "inner_optimizer": configs.to_config(self.inner_optimizer, "optimizers"),
                "initial_scale": self.initial_scale, "dynamic_growth_steps": self.dynamic_growth_steps}


class UpdateRule(ComparesByConfiguration):
    """The update of parameters from gradients. It compares by its configuration, like its optimizer.

    Args:
      optimizer: optimizer of the trained parameters, or a `LossScaleOptimizer` of it.
      is_frozen: whether to freeze the parameter at a path, such as "encoder/Dense_0/kernel". The optimizer does not see
        frozen parameters, and keeps no state for them.
      prefix: prefix of the paths of these parameters, such as "generator/".
      ema_decay: decay of a moving average of the trained parameters, kept in float32 in the optimizer's state; None
        for no average.
      scales_gradients: whether to keep a dynamic loss scale in the optimizer's state. Updates with non-finite gradients
        are then skipped.
      skips_non_finite: whether to skip such updates also without a loss scale.
      spike_rule: the rule by which updates are skipped for their loss and gradient norm; None skips none.
      keeps_norms: whether to keep the norms of each update in the optimizer's state.

    Attributes:
      optimizer: the optimizer, without `LossScaleOptimizer`.
      given: the `optimizer` argument, which may be a `LossScaleOptimizer`.
      spike_rule: the argument of the same name.
      skips_non_finite: whether updates with non-finite gradients are skipped also without a loss scale.

    Example:
      >>> from trainer import optimizers
      >>> rule = UpdateRule(optimizers.SGD(0.5), is_frozen=lambda path: path == "bias")
      >>> params = {"bias": jnp.ones(()), "kernel": jnp.ones(())}
      >>> params, state = rule.update(rule.trainable(params), rule.init(params), params)
      >>> {name: float(value) for name, value in params.items()}
      {'bias': 1.0, 'kernel': 0.5}
    """

    def __init__(
        self,
        optimizer: Optimizer | LossScaleOptimizer,
        *,
        is_frozen: Callable[[str], bool] | None = None,
        prefix: str = "",
        ema_decay: float | None = None,
        scales_gradients: bool = False,
        skips_non_finite: bool = False,
        spike_rule: spikes.SpikeRule | None = None,
        keeps_norms: bool = False,
    ):
        self._initial_scale, self._growth_steps = precision.INITIAL_SCALE, precision.GROWTH_STEPS
        self.given = optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            self._initial_scale, self._growth_steps = optimizer.initial_scale, optimizer.dynamic_growth_steps
            if not scales_gradients:
                raise ValueError(
                    "`LossScaleOptimizer` sets how the loss scale of float16 adapts, and this precision has none. Give "
                    "`compile(..., precision=\"mixed_float16\")` too, or the inner optimizer alone.")
            optimizer = optimizer.inner_optimizer
        self.optimizer = optimizer
        self._is_frozen = is_frozen
        self._prefix = prefix
        self._ema_decay = ema_decay
        self._scales_gradients = scales_gradients
        self.skips_non_finite = skips_non_finite or spike_rule is not None
        self.spike_rule = spike_rule
        self._keeps_norms = keeps_norms

    def trainable(self, tree: PyTree) -> Any:
        """Returns the trained part of a tree of parameters or gradients."""
        is_frozen = self._is_frozen
        if is_frozen is None:
            return tree
        return tree_paths.kept(tree, lambda path: not is_frozen(path), self._prefix)

    def init(self, params: PyTree) -> OptimizerState:
        """Returns the state before the first update.

        Raises:
          ValueError: if both the optimizer and `ema_decay` average the parameters.
        """
        trainable = self.trainable(params)
        state = self.optimizer.init(trainable)
        if self._ema_decay is not None:
            if keeps_averages(state.inner):
                raise ValueError("`ema_decay` cannot be used with an optimizer that averages the parameters itself. "
                                 f"Received: ema_decay={self._ema_decay:g} and an optimizer of `schedule_free` or "
                                 "`lookahead`, with whose averages `evaluate` computes. Leave out `ema_decay`.")
            state = state._replace(average=jax.tree.map(_as_average, trainable))
        if self._scales_gradients:
            state = state._replace(loss_scale=precision.initial_loss_scale(self._initial_scale))
        if self._keeps_norms:
            zeros = dict.fromkeys(norms.squares(trainable, self._prefix), jnp.zeros((), jnp.float32))
            state = state._replace(norms=norms.Norms(*({name: jnp.zeros((), jnp.float32) for name in zeros}
                                                       for _ in norms.LOGS)))
        return self.with_counts(state)

    def check_weights(self, paths: Iterable[str]) -> None:
        """Raises ValueError if the optimizer names a weight that is not among these paths of the model."""
        self.optimizer.check_weights(path.removeprefix(self._prefix) for path in paths if path.startswith(self._prefix))

    def with_counts(self, state: OptimizerState) -> OptimizerState:
        """Returns the state of a rule with another `skips_non_finite` or `spike_rule`, converted for this rule.

        Adds or drops the counts of skipped updates, and the last losses and norms.
        """
        if self.spike_rule is None:
            state = state._replace(spikes=None)
        elif state.spikes is None or len(state.spikes.losses) != self.spike_rule.window:
            state = state._replace(spikes=spikes.first(self.spike_rule))
        if not self._skips:
            return state._replace(skipped=None)
        return state if state.skipped is not None else state._replace(skipped=precision.no_skipped_updates())

    @property
    def _skips(self) -> bool:
        return self._scales_gradients or self.skips_non_finite

    def with_trained(self, params: PyTree, trained: PyTree) -> Any:
        """Returns all parameters, with the trained parameters replaced by `trained`."""
        return trained if self._is_frozen is None else _with(params, trained)

    def update(
        self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any] | None = None
    ) -> tuple[Any, OptimizerState]:
        """Returns the parameters and the state after an update.

        Args:
          grads: gradients of the trained parameters, as returned by `trainable`.
          state: the result of `init` or of the last `update`. The next state has its structure, shapes and dtypes.
          params: all parameters, including frozen parameters.
          extra: extra arguments for the optimizer; see `Optimizer.update`.
        """
        trainable = self.trainable(params)
        updates, new_state = self.optimizer.update(grads, state, trainable, extra)
        new = optax.apply_updates(trainable, updates)
        average = state.average
        if self._ema_decay is not None:
            # As in Keras, the first update sets the average.
            decay = jnp.where(state.count == 0, 0.0, self._ema_decay)
            average = jax.tree.map(lambda mean, leaf: decay * mean + (1 - decay) * _as_average(leaf), average, new)
        new_state = new_state._replace(average=average, loss_scale=state.loss_scale, skipped=state.skipped,
                                       norms=state.norms, spikes=state.spikes)
        if self._skips:
            is_finite = is_made = precision.all_finite(grads)
            kept = state.spikes
            if self.spike_rule is not None:
                norm = jnp.sqrt(sum(norms.squares(grads).values(), jnp.float32(0)))
                # Without a loss, its ring holds zeros, of which none is a spike.
                loss = jnp.asarray((extra or {}).get("value", 0), jnp.float32)
                is_made &= jnp.isfinite(loss) & ~spikes.is_spike(self.spike_rule, state.spikes, loss, norm)
                kept = spikes.after(state.spikes, loss, norm, is_made)
            new, new_state = precision.where_finite(is_made, (new, new_state), (trainable, state))
            new_state = new_state._replace(skipped=precision.next_skipped_updates(state.skipped, is_made), spikes=kept)
            if self._scales_gradients:
                new_state = new_state._replace(loss_scale=precision.next_loss_scale(
                    state.loss_scale, is_finite, self._growth_steps))
        if self._keeps_norms:
            if self._skips:
                updates = precision.where_finite(is_made, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = new_state._replace(norms=norms.Norms(
                *(norms.squares(tree, self._prefix) for tree in (grads, updates, new))))
        return self.with_trained(params, new), new_state

    def keeps_averages(self, state: OptimizerState) -> bool:
        """Returns whether `averaged` returns parameters that differ from the trained parameters."""
        return self._ema_decay is not None or keeps_averages(state.inner)

    def averaged(self, state: OptimizerState, params: PyTree) -> Any:
        """Returns `params` with the trained parameters replaced by the parameters for evaluation.

        These are the moving average, if it is kept, or the average of an averaging optimizer such as `schedule_free`.
        """
        if not self.keeps_averages(state):
            return params
        trainable = self.trainable(params)
        if self._ema_decay is None:
            average = evaluation_params(state.inner, trainable)
        else:
            average = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), state.average, trainable)
        return self.with_trained(params, average)

    def reads_params_in_init(self, params: PyTree) -> bool:
        """Returns whether the first state depends on the values of the parameters, as DoG's state does."""
        traced = jax.make_jaxpr(lambda params: self.optimizer.init(params).inner)(self.trainable(params)).jaxpr
        given = set(traced.invars)
        return any(not isinstance(value, jax.extend.core.Literal) and value in given
                   for values in ([equation.invars for equation in traced.eqns] + [traced.outvars]) for value in values)

    def restarted(self, state: OptimizerState, params: PyTree) -> OptimizerState:
        """Returns the state for an averaging optimizer to continue from parameters that it has not computed."""
        inner = map_averages(lambda path, leaf, param: param.astype(leaf.dtype), state.inner, self.trainable(params))
        return state._replace(inner=inner)


def _as_average(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _with(tree: PyTree, part: Any) -> Any:
    """Returns nested dicts with leaves replaced by the leaves of `part`."""
    return {name: value if name not in part
            else _with(value, part[name]) if isinstance(value, Mapping) else part[name]
            for name, value in tree.items()}
