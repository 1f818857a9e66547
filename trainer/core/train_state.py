"""TrainState: all values that a train step reads and replaces, as a frozen pytree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from trainer.core import errors, overwritten
from trainer.core.foreign_names import ForeignNames, ForeignNamesOfClass
from trainer.core.replica_context import MEAN_BY_DEFAULT, ReduceOp, ReplicaContext, get_replica_context
from trainer.core.tree_paths import named_leaves, restricted, updated
from trainer.core.types import Layout, PyTree
from trainer.core.updates import norms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState(ForeignNames, metaclass=ForeignNamesOfClass):
    """The state of training after `step` steps.

    Attributes:
      step: number of completed train steps, an int32 scalar. It advances once per train step, however often gradients
        are applied.
      params: trainable arrays, a nested dict; for a dict of modules, with an entry per module.
      model_state: all other collections of the model, such as BatchNorm's running averages.
      opt_state: optimizer state; for a dict of optimizers, with an entry per optimizer. None without an optimizer.
      seed: seed of all random streams, a uint32 scalar.
      layouts: sharding annotations of the parameters, as pairs of a path and a layout. Not part of the pytree's leaves.
      optimizer: the `UpdateRule` that applies gradients, or a mapping of module names to rules. Not part of the
        pytree's leaves.
    """

    _foreign_names = {
        "create": "A model makes its state: `model.build(x)`, then `model.state`.",
        "tx": "The optimizer is given to `compile`.",
        "apply_fn": "Instead: `model.apply(state.params, state, x)`.",
        "batch_stats": "Instead: `state.model_state[\"batch_stats\"]`.",
    }

    step: jax.Array
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    seed: jax.Array
    optimizer: Any = dataclasses.field(default=None, metadata={"static": True})
    layouts: tuple[tuple[str, Layout], ...] = dataclasses.field(default=(), metadata={"static": True})

    def replace(self, **changes: Any) -> TrainState:
        """Returns a copy with the given fields replaced."""
        return dataclasses.replace(self, **changes)

    @property
    def differentiable(self) -> Any:
        """Values to differentiate the loss by: `params`, and the collection that gradients overwrite, if there is one.

        Without layers such as Flax's FP8 layers, these are just `params`. Such layers keep scales in the collection
        "_overwrite_with_gradient" of `model_state`, whose gradients are their next values. `Model.apply` takes the
        result in place of `params`, and `apply_gradients` takes its gradients.

        Example:
          >>> grads = jax.grad(loss_fn)(state.differentiable)  # doctest: +SKIP
          >>> state = state.apply_gradients(grads)  # doctest: +SKIP
        """
        return overwritten.joined(self.params, overwritten.split(self.model_state)[1])

    def trainable(self, tree: PyTree) -> Any:
        """Returns the trained part of a tree like `params`, without frozen leaves."""
        tree, kept = overwritten.split(tree)
        if kept:
            return overwritten.joined(self.trainable(tree), kept)
        if isinstance(self.optimizer, Mapping):
            return {name: rule.trainable(tree[name]) for name, rule in self.optimizer.items()}
        return {} if self.optimizer is None else self.optimizer.trainable(tree)

    @property
    def loss_scale(self) -> jax.Array | None:
        """Current factor of gradients inside of the model, a float32 scalar; None without a loss scale."""
        scales = [part.loss_scale.scale for part in self._opt_states() if part.loss_scale is not None]
        return functools.reduce(jnp.minimum, scales) if scales else None

    def with_one_loss_scale(self) -> TrainState:
        """Returns the state with the least loss scale of several optimizers, which is in use, in all of them."""
        if self.loss_scale is None or not isinstance(self.optimizer, Mapping):
            return self
        opt_state = {name: part._replace(loss_scale=part.loss_scale._replace(scale=self.loss_scale))
                     for name, part in self.opt_state.items()}
        return self.replace(opt_state=opt_state)

    @property
    def skipped_updates(self) -> Any:
        """A `precision.SkippedUpdates` of all optimizers, with the largest count in a row; None if never skipped."""
        skipped = [part.skipped for part in self._opt_states() if part.skipped is not None]
        if not skipped:
            return None
        return skipped[0]._replace(total=functools.reduce(jnp.add, [counts.total for counts in skipped]),
                                   in_a_row=functools.reduce(jnp.maximum, [counts.in_a_row for counts in skipped]))

    @property
    def norm_logs(self) -> dict[str, jax.Array]:
        """The logs of the norms of the last updates; empty if they are not kept."""
        kept = [part.norms for part in self._opt_states() if part.norms is not None]
        return norms.as_logs(kept) if kept else {}

    @property
    def skips_non_finite(self) -> bool:
        """Whether updates with non-finite gradients are skipped also without a loss scale."""
        rules = self.optimizer.values() if isinstance(self.optimizer, Mapping) else [self.optimizer]
        return any(rule is not None and rule.skips_non_finite for rule in rules)

    @property
    def spike_streak(self) -> int | None:
        """The `streak` of the `SpikeRule` of the optimizers; None if spikes are not skipped."""
        rules = self.optimizer.values() if isinstance(self.optimizer, Mapping) else [self.optimizer]
        streaks = [rule.spike_rule.streak for rule in rules if rule is not None and rule.spike_rule is not None]
        return streaks[0] if streaks else None

    @property
    def keeps_averages(self) -> bool:
        """Whether `averaged` has other parameters, because moving averages are kept or the optimizer averages."""
        if isinstance(self.optimizer, Mapping):
            return any(rule.keeps_averages(self.opt_state[name]) for name, rule in self.optimizer.items())
        return self.optimizer is not None and self.optimizer.keeps_averages(self.opt_state)

    def averaged(self) -> TrainState:
        """Returns the state for evaluation, with averages of the parameters if they are kept."""
        if self.optimizer is None:
            return self
        if isinstance(self.optimizer, Mapping):
            averages = {name: rule.averaged(self.opt_state[name], self.params[name])
                        for name, rule in self.optimizer.items()}
            return self.replace(params={**self.params, **averages})
        return self.replace(params=self.optimizer.averaged(self.opt_state, self.params))

    def with_averages_adopted(self) -> TrainState:
        """Returns the state with the averages as parameters, from which an averaging optimizer restarts."""
        state = self.averaged()
        if isinstance(self.optimizer, Mapping):
            return state.replace(opt_state={name: rule.restarted(self.opt_state[name], state.params[name])
                                            for name, rule in self.optimizer.items()})
        return state.replace(opt_state=self.optimizer.restarted(self.opt_state, state.params))

    def _opt_states(self) -> list[Any]:
        if self.optimizer is None:
            return []
        return list(self.opt_state.values()) if isinstance(self.optimizer, Mapping) else [self.opt_state]

    def apply_gradients(
        self,
        grads: PyTree = None,
        *,
        model_state: PyTree = None,
        reduce: ReduceOp | str | None = MEAN_BY_DEFAULT,
        value: ArrayLike | None = None,
        value_fn: Callable[[PyTree], jax.Array] | None = None,
        **named_grads: Any,
    ) -> TrainState:
        """Returns the state after an optimizer update.

        Args:
          grads: gradients, a tree like `params`; in `strategy.run`, this replica's gradients. If the model has FP8
            layers, a tree like `differentiable`.
          model_state: new model state, as returned by `Model.apply`; None leaves it unchanged.
          reduce: reduction of gradients over the replicas of `strategy.run`. "mean", the default, suits losses from
            `Model.compute_loss`; "sum" suits a loss divided by the global batch; None leaves them unreduced. If a
            function for `strategy.run` does not set it, its first run is compared with a single device.
          value: the loss, for transformations that need it, such as `optax.contrib.reduce_on_plateau`. In
            `strategy.run` it is this replica's loss, which is reduced like gradients.
          value_fn: returns the loss for other parameters, a tree like `params`, for line searches. It is ignored with
            several optimizers, and on replicas of a strategy that splits the state.
          **named_grads: gradients of single modules by name, if the model is a dict of modules. Other modules keep
            their parameters.

        Raises:
          ValueError: there is no optimizer, a name has no optimizer, or gradients are missing; in `strategy.run`,
            without `reduce`, the gradients are scaled for a sum. The model has FP8 layers, whose gradients are
            missing, and with a loss scale, several replicas or parameter servers.
          TypeError: neither or both of `grads` and `named_grads` are given.

        Example:
          >>> state = state.apply_gradients(grads, model_state=model_state)  # doctest: +SKIP
          >>> state = state.apply_gradients(generator=grads)  # doctest: +SKIP
        """
        if grads is None and isinstance(self.optimizer, Mapping) and "value" in self.optimizer and value is not None:
            named_grads, value = {**named_grads, "value": value}, None  # a module of that name
        if self.optimizer is None:
            raise ValueError("There is no optimizer to apply gradients with: call `compile(optimizer=...)` first.")
        if (grads is None) == (not named_grads):
            raise TypeError("`apply_gradients` takes either one tree of gradients or gradients by module name, such "
                            "as `apply_gradients(generator=grads)`. Received: "
                            + ("both." if named_grads else "neither."))
        if named_grads and not isinstance(self.optimizer, Mapping):
            raise ValueError(f"Gradients were given by name ({', '.join(named_grads)}), but the model was compiled "
                             "with one optimizer for everything. Compile it with a dict of optimizers by module name.")
        context = get_replica_context()
        grads, by_gradients = overwritten.split(grads)
        named_grads, by_named_gradients = overwritten.split(named_grads)
        by_gradients = by_gradients or by_named_gradients
        _check_overwritten(self, by_gradients, named_grads or None, context)
        context.is_told_reduction = reduce is not MEAN_BY_DEFAULT
        context.untold_reductions += not context.is_told_reduction
        extra: dict[str, Any] = {} if value is None else {"value": context.reduce_loss(reduce, value)}
        if isinstance(self.optimizer, Mapping):
            params, opt_state = self._updated_by_name(named_grads or grads, reduce, extra)
        else:
            trained = self.optimizer.trainable(grads)
            _check_gradients(trained, self.optimizer.trainable(self.params))
            reduced = context.reduce_gradients(reduce, trained)
            if value_fn is not None:
                of_trained = context.reduce_loss_fn(
                    reduce, lambda trained: value_fn(self.optimizer.with_trained(self.params, trained)))
                extra |= {"value_fn": of_trained, "grad_fn": lambda trained, *_: jax.grad(of_trained)(trained)}
            params, opt_state = context.update(self.optimizer, reduced, self.opt_state, self.params, extra)
        return dataclasses.replace(
            self,
            step=self.step + 1,
            params=params,
            opt_state=opt_state,
            # Without sown values such as losses, which are not part of the state.
            model_state=updated(self.model_state if model_state is None else restricted(model_state, self.model_state),
                                by_gradients),
        )

    def _updated_by_name(
        self, grads: Mapping[str, Any], reduce: ReduceOp | str | None, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        context = get_replica_context()
        for name in grads:
            if name not in self.optimizer:
                raise ValueError(f"{errors.unknown_name('module for gradients', name, self.optimizer)} Gradients of "
                                 f"a module have its name: `apply_gradients({next(iter(self.optimizer))}=grads)`.")
        trained = {name: self.optimizer[name].trainable(tree) for name, tree in grads.items()}
        _check_gradients(trained, {name: self.optimizer[name].trainable(self.params[name]) for name in grads})
        reduced = context.reduce_gradients(reduce, trained)  # in one call: each is a rendezvous of all replicas
        params, opt_state = dict(self.params), dict(self.opt_state)
        for name, tree in reduced.items():
            params[name], opt_state[name] = context.update(
                self.optimizer[name], tree, opt_state[name], params[name], extra)
        return params, opt_state


def _check_gradients(grads: PyTree, params: PyTree) -> None:
    given, expected = named_leaves(grads), named_leaves(params)
    missing, others = ([name for name in one if name not in other] for one, other in (
        (expected, given), (given, expected)))
    if missing or others:
        listed = [f"{kind} {', '.join(map(repr, names[:errors.MAX_ITEMS]))}" for kind, names in (
            ("no gradients of", missing), ("gradients of unknown", others)) if names]
        raise ValueError("`apply_gradients` needs the gradients of all parameters that are trained, in a tree like "
                         f"`state.params`. Received: {' and '.join(listed)}. Freeze parameters that are not to be "
                         "trained by `compile(freeze=...)`, or give them zeros.")


def _check_overwritten(
    state: TrainState, given: Mapping[str, Any], names: Iterable[str] | None, context: ReplicaContext
) -> None:
    """Raises ValueError if the collection that gradients overwrite would differ from one device's result."""
    expected = overwritten.split(state.model_state)[1]
    if names is not None and overwritten.OVERWRITTEN not in expected:
        expected = {name: expected[name] for name in names if name in expected}
    if not expected:
        return
    what = (f"The model has the collection {overwritten.OVERWRITTEN!r}, such as the scales of FP8 layers, which each "
            "step overwrites with its gradient")
    if context.pushes_gradients:
        raise ValueError(f"{what}. Servers of ParameterServerStrategy cannot: train under a synchronous strategy.")
    if context.num_replicas_in_sync > 1:
        raise ValueError(f"{what}. It has no reduction over the {context.num_replicas_in_sync} replicas of "
                         "`strategy.run`: train by `fit` or an overridden `train_step`, which sees the whole batch.")
    if state.loss_scale is not None:
        raise ValueError(f"{what}. A loss scale would change it: use `compile(precision=\"mixed_bfloat16\")`, which "
                         "needs none.")
    if named_leaves(given).keys() != named_leaves(expected).keys():
        raise ValueError(f"{what}, and `apply_gradients` was not given all of that. Differentiate by "
                         "`state.differentiable` in place of `state.params`: `self.apply` takes it as `params`, and "
                         "`apply_gradients` takes its gradients.")


def initial_state(
    params: PyTree, model_state: PyTree, optimizer: Any, seed: jax.Array,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=initial_opt_state(optimizer, params),
        seed=seed,
        optimizer=optimizer,
        layouts=tuple(layouts.items()),
    )


def initial_opt_state(optimizer: Any, params: PyTree) -> Any:
    """Returns the optimizer state for `params`; None without an optimizer."""
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        return {name: part.init(params[name]) for name, part in optimizer.items()}
    return optimizer.init(params)


def shapes_of(tree: PyTree) -> Any:
    """Returns the shapes and dtypes of a tree of arrays, such as a state."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def check_same_structure(function: str, before: TrainState, after: TrainState) -> None:
    """Raises TypeError if `function` changed the structure, shapes or dtypes of a state."""
    old, new = _described(before), _described(after)
    if old != new:
        path = next(path for path in [*old, *new] if old.get(path) != new.get(path))
        raise TypeError(f"`{function}` changed the structure of the state: `state{path}` was {old.get(path, 'absent')} "
                        f"and became {new.get(path, 'absent')}. A step keeps the tree, shapes and dtypes of the state "
                        "it was given.")


def check_is_overwritten(function: str, before: TrainState, after: TrainState) -> None:
    """Raises ValueError if `function` changed parameters, and left the collection that gradients overwrite unchanged.

    Both are compared by identity, as a traced function is given arrays without values.
    """
    old, new = (overwritten.split(state.model_state)[1] for state in (before, after))
    for name, values in old.items():
        params = (before.params, after.params) if name == overwritten.OVERWRITTEN else (
            before.params[name], after.params[name])
        if not _are_same(*params) and _are_same(values, new[name]):
            raise ValueError(f"`{function}` trained the parameters and left the collection {overwritten.OVERWRITTEN!r} "
                             "as it was, such as the scales of FP8 layers, which a step overwrites with its gradient. "
                             "Differentiate by `state.differentiable`, and return what `state.apply_gradients(grads)` "
                             "returns.")


def _refuse_to_set(state: TrainState, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(
        f"`{name}` of a state is not set. Make another state, and set that: `model.state = model.state.replace("
        f"{name}=...)`; in a `train_step`, return it.")


TrainState.__setattr__ = _refuse_to_set  # type: ignore[method-assign, assignment]


def _are_same(tree: PyTree, other: PyTree) -> bool:
    return all(one is another for one, another in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def _described(state: TrainState) -> dict[str, str]:
    return {jax.tree_util.keystr(path): f"{tuple(leaf.shape)} {leaf.dtype}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
