"""Optimizer: an optax transformation with a learning rate that can be read and set.

Owns the storage, reading and setting of the rate. The current rate is an array in the optimizer's state, so setting it
does not recompile. The transformation computes the updates.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.core import configs
from trainer.core.errors import page_url, unknown_argument
from trainer.core.foreign_names import ForeignNames
from trainer.core.identity import ComparesByConfiguration
from trainer.core.types import PyTree
from trainer.optimizers.extra_arguments import update_with
from trainer.optimizers.learning_rate import LearningRate, Schedule, as_rate
from trainer.optimizers.schedules import LearningRateSchedule, deserialize, serialize
from trainer.optimizers.transforms.accumulation import AveragedGradients
from trainer.optimizers.weights_without_decay import WeightsWithoutDecay

_EXCLUDED = "exclude_from_weight_decay"  # in configurations


class OptimizerState(NamedTuple):
    """The state of an optimizer.

    Attributes:
      count: number of updates, an int32 scalar.
      learning_rate: a float32 scalar: the rate if it is constant, or a factor of the schedule.
      inner: state of the optax transformation.
      average: moving average of the trained parameters, a float32 tree of the same structure; None if not kept.
      loss_scale: a `precision.LossScale`; None if gradients are not scaled.
      skipped: a `precision.SkippedUpdates`; None if updates with non-finite gradients are not skipped.
      spikes: the `Spikes` of the last updates; None if spikes are not skipped.
      norms: the `Norms` of the last update; None if they are not logged.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    learning_rate: jax.Array
    inner: Any
    average: Any = None
    loss_scale: Any = None
    skipped: Any = None
    norms: Any = None
    spikes: Any = None


class Optimizer(ComparesByConfiguration, ForeignNames):
    """Turns gradients into updates of parameters, at a learning rate that can be read and set.

    An optimizer holds no arrays: `init` creates its state, and `update` returns the next state. Optimizers compare by
    configuration, so they can be static metadata of a pytree, and equal optimizers share compiled functions. Use a
    class with a Keras name, or `optimizers.get` for an optax transformation. Construct this class directly for a
    transformation that takes the learning rate as an argument.

    Args:
      transformation: an optax transformation that returns the final updates, to be added to the parameters. Its
        `update` receives the rate as the extra argument `learning_rate`, a float32 scalar.
      learning_rate: a non-negative number, or a schedule: a function from the number of updates, an int32 scalar, to
        a scalar, such as optax's schedules and `optimizers.schedules`.
      name: name of the optimizer; by default, its class's name in lower case.

    Raises:
      TypeError: if `learning_rate` is neither a number nor a function.
      ValueError: if `learning_rate` is negative or not finite.

    Example:
      >>> import optax
      >>> from trainer import optimizers
      >>> optimizer = optimizers.SGD(learning_rate=0.5)
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.array([1.0, 0.0])}, state, params)
      >>> optax.apply_updates(params, updates)["w"].tolist()
      [0.5, 2.0]
      >>> state = optimizer.with_learning_rate(state, 0.25)
      >>> float(optimizer.read_learning_rate(state))
      0.25
    """

    _foreign_names = {
        "step": "`fit` applies the gradients; in a `train_step`, `state.apply_gradients(grads)` does.",
        "minimize": "`fit` computes and applies the gradients; in a `train_step`, `jax.grad` and "
                    "`state.apply_gradients(grads)` do.",
        "zero_grad": "Leave it out: `jax.grad` returns new gradients each time.",
        "apply_gradients": "In a `train_step`, `state.apply_gradients(grads)` returns the next state.",
        "param_groups": f"Its rate is `learning_rate`. Rates by layer: {page_url('optimizers', 'rates-by-layer')}",
        "state_dict": "Its state is `model.state.opt_state`, which `model.save(path)` saves.",
    }

    # The arguments of the constructor.
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    _without_decay: WeightsWithoutDecay
    _is_used: bool  # whether there is a state, whose updates depend on the attributes

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        signature = inspect.signature(cls.__init__)
        for name in () if _keywords_of(signature) else sorted(options.keys() - signature.parameters.keys()):
            raise unknown_argument(cls.__name__, name, signature.parameters)
        made = super().__new__(cls)
        made._given = arguments, options
        made._without_decay = WeightsWithoutDecay()
        made._is_used = False
        return made

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        learning_rate: float | Schedule,
        name: str | None = None,
    ):
        self.name = name or type(self).__name__.lower()
        self.transformation = transformation
        self.schedule = learning_rate if callable(learning_rate) else None
        self._initial = 1.0 if callable(learning_rate) else as_rate(
            learning_rate, "a number or a schedule, such as `trainer.optimizers.schedules.CosineDecay(0.001, 1000)`")

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and name in (arguments := self.constructor_arguments()):
                return arguments[name]
            return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A class of the user's may keep an argument, and read it in its updates.
        is_made = "_initial" in vars(self) and type(self).__init__.__module__.startswith("trainer.")
        is_kept = name in vars(self) or hasattr(type(self), name)
        if is_made and not is_kept and name in self.constructor_arguments():
            raise AttributeError(f"`{name}` of {self!r} is read when the optimizer is made: setting it would change no "
                                 f"update. Make another: `{type(self).__name__}(..., {name}={value!r})`.",
                                 name=name, obj=self)
        super().__setattr__(name, value)

    def constructor_arguments(self) -> dict[str, Any]:
        """Returns the constructor's arguments by name, including defaults.

        They can be read as attributes, too.

        Example:
          >>> from trainer import optimizers
          >>> optimizers.SGD(momentum=0.9).constructor_arguments()["momentum"], optimizers.SGD(momentum=0.9).momentum
          (0.9, 0.9)
        """
        try:
            given, further = _given_arguments(inspect.signature(type(self).__init__), *self._given)
        except (AttributeError, TypeError):  # before `__new__` has ended, or `__init__` is about to raise it
            return {}
        return given | further

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in _changed_arguments(type(self), *self._given).items())
        without = f", {_EXCLUDED}={self._without_decay}" if any(self._without_decay) else ""
        return f"{type(self).__name__}({given}{without})"

    def __reduce__(self) -> Any:
        # The transformation is made again, as functions within functions cannot be pickled.
        return _made_again, (type(self), *self._given, self._initial, self._without_decay)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments as plain data.

        Raises:
          TypeError: if an argument is an optax transformation or a function.

        Example:
          >>> from trainer import optimizers
          >>> optimizers.SGD(0.5, momentum=0.9).get_config()["momentum"]
          0.9
        """
        arguments, options = self._given
        signature = inspect.signature(type(self).__init__)
        given, further = _given_arguments(signature, arguments, options)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL and given.pop(name, ()):
                raise TypeError(f"{type(self).__name__} takes `*{name}`, which have no names in a configuration. Name "
                                "the arguments of its `__init__`, or give it a `get_config`.")
        config = given | further
        present = {"name": self.name, "learning_rate": float(self._initial) if self.schedule is None else self.schedule}
        config |= {name: value for name, value in present.items() if name in config}
        for name, value in config.items():
            if isinstance(value, LearningRateSchedule):
                config[name] = serialize(value)
            elif callable(value) or isinstance(value, optax.GradientTransformation):
                raise TypeError(f"`{name}` of {type(self).__name__} cannot be written as plain data. Received: a value "
                                f"of type {type(value).__name__}. Save the model's state, and make the optimizer again "
                                "in code; a rate may be one of `trainer.optimizers.schedules`.")
        if any(self._without_decay):
            config[_EXCLUDED] = {name: list(value) for name, value in self._without_decay._asdict().items()}
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates an optimizer from the result of `get_config`."""
        if _EXCLUDED in config:
            config = dict(config)
            excluded = config.pop(_EXCLUDED)
            made = cls.from_config(config)
            made._without_decay = WeightsWithoutDecay(tuple(excluded["paths"]), tuple(excluded["names"]))
            return made
        if configs.is_config(config.get("learning_rate")):
            config = {**config, "learning_rate": deserialize(config["learning_rate"])}
        return cls(**config)

    def _attributes(self) -> dict[str, Any]:
        # Equal calls compare equal: `SGD(0.1)` is `SGD(learning_rate=0.1)`.
        return {name: key for name, key in super()._attributes().items() if name not in ("_given", "_is_used")}

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes weights from the optimizer's weight decay. Replaces the weights of an earlier call.

        Call it before the model is built or trained.

        Args:
          var_list: weights of a built model, such as `model.layers[0].trainable_variables`.
          var_names: regular expressions, searched in the paths of weights, such as "Dense_0/bias". In a model of named
            modules, paths begin within the module.

        Raises:
          TypeError: if an argument has another type.
          ValueError: if the optimizer is in use, has no `weight_decay` argument, or an expression is invalid; from
            `fit`, if a weight is not among the model's, or no weight matches.

        Example:
          >>> from trainer import optimizers
          >>> optimizer = optimizers.AdamW(weight_decay=0.01)
          >>> optimizer.exclude_from_weight_decay(var_names=["bias", "scale"])

        Source: `keras.optimizers.Optimizer.exclude_from_weight_decay`, which searches only the last part of the path.
        """
        if self._is_used:
            raise ValueError("`exclude_from_weight_decay()` can only be configured before the optimizer is built. Call "
                             "it before the model is built or trained, on an optimizer of its own.")
        signatures = (inspect.signature(base.__init__) for base in type(self).__mro__)  # type: ignore[misc]
        if not any("weight_decay" in signature.parameters for signature in signatures):
            raise ValueError(f"{self!r} has no `weight_decay` argument. For an optax transformation, give a mask to "
                             "`optax.add_decayed_weights`, or to an optimizer such as `optax.adamw`.")
        self._without_decay = WeightsWithoutDecay.of(var_list, var_names)

    def check_weights(self, names: Iterable[str]) -> None:
        """Raises ValueError if these paths lack a weight that is excluded from weight decay."""
        self._without_decay.check(names)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of calls of `update` per parameter update."""
        return self.transformation.steps if isinstance(self.transformation, AveragedGradients) else 1

    @property
    def kind(self) -> str:
        """The optimizer's name, without hyperparameters; the same text in every process."""
        return type(self).__name__

    def init(self, params: PyTree) -> OptimizerState:
        """Returns the state before the first update.

        Args:
          params: any pytree of floating-point arrays, also an empty tree.
        """
        self._is_used = True
        return OptimizerState(
            count=jnp.zeros((), jnp.int32),
            learning_rate=jnp.asarray(self._initial, jnp.float32),
            inner=self.transformation.init(params),
        )

    def update(
        self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any] | None = None
    ) -> tuple[Any, OptimizerState]:
        """Returns the updates, to be added to `params` with `optax.apply_updates`, and the next state.

        Args:
          grads: gradients, a tree like `params`.
          state: the result of `init` or of the last `update`. The next state has its structure, shapes and dtypes.
          params: parameters.
          extra: extra arguments that the transformation may need: the loss as "value", and functions of the parameters
            that return the loss ("value_fn") and its gradients ("grad_fn").

        Raises:
          ValueError: if the transformation needs an argument that is not available.
        """
        updates, inner = self._transform(grads, state, params, {"grad": grads, **(extra or {})})
        return updates, OptimizerState(optax.safe_increment(state.count), state.learning_rate, inner)

    def _transform(
        self, grads: PyTree, state: OptimizerState, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        rate = self.read_learning_rate(state)
        excluded = {"decays": self._without_decay.decays} if any(self._without_decay) else {}
        return update_with(self.transformation, grads, state.inner, params, extra, learning_rate=rate, **excluded)

    def read_learning_rate(self, state: OptimizerState) -> jax.Array:
        """Returns the learning rate of the next update, a float32 scalar."""
        return self.rate_at(self.schedule_count(state), state.learning_rate)

    def schedule_count(self, state: OptimizerState) -> jax.Array:
        """Returns the number of updates that the schedule receives, an int32 scalar."""
        return state.count

    def with_learning_rate(self, state: OptimizerState, value: object) -> OptimizerState:
        """Returns `state` with another learning rate for the next update.

        Replaces a constant rate. Multiplies a schedule, including all later values, by the ratio of `value` to its
        current value. Call it between steps. The new scalar has the sharding of the old scalar, so that a compiled step
        accepts it without recompilation.

        Args:
          state: the current state.
          value: the rate, a non-negative number.

        Raises:
          TypeError: if `value` is not a number.
          ValueError: if `value` is negative or not finite, or if the schedule is at 0, which no factor can change.
        """
        stored = self._as_stored(self.schedule_count(state), value)
        return state._replace(learning_rate=jnp.full_like(state.learning_rate, stored))

    @property
    def initial_learning_rate(self) -> float | None:
        """The rate given to the constructor; None if the rate is a schedule or unknown."""
        rate = _changed_arguments(type(self), *self._given).get("learning_rate")
        return float(rate) if isinstance(rate, (int, float, np.number, np.ndarray, jax.Array)) else None

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate of the first update of a new state.

        Setting it affects later calls of `init`, but not existing states. A compiled step that contains `init` keeps
        the rate of its trace.
        """
        return LearningRate(self.rate_at(jnp.zeros((), jnp.int32), self._initial))

    @learning_rate.setter
    def learning_rate(self, value: object) -> None:
        self._initial = self._as_stored(jnp.zeros((), jnp.int32), value)

    def rate_at(self, count: jax.Array, stored: Any) -> jax.Array:
        """Returns the rate after `count` updates, for the `learning_rate` stored in a state."""
        if self.schedule is None:
            return jnp.asarray(stored, jnp.float32)
        return jnp.asarray(self.schedule(count), jnp.float32) * stored

    def _as_stored(self, count: jax.Array, value: Any) -> float:
        rate = as_rate(value)
        if self.schedule is None:
            return rate
        scheduled = float(self.schedule(count))
        if scheduled == 0:
            raise ValueError(
                f"The learning rate cannot be set to {rate:g}: the optimizer's own rate is 0 after {int(count)} "
                "updates, and setting one multiplies it by a factor. Give the optimizer a rate or a schedule above 0."
            )
        return rate / scheduled


def _made_again(
    cls: type[Optimizer], arguments: tuple[Any, ...], options: dict[str, Any], initial: float,
    without_decay: WeightsWithoutDecay,
) -> Optimizer:
    made = cls(*arguments, **options)
    made._initial, made._without_decay = initial, without_decay
    return made


def _changed_arguments(cls: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call that differ from the defaults, by name."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    try:
        given, further = _given_arguments(signature, arguments, options)
    except TypeError:  # `__init__` is about to raise it, or a copy is being made
        return {}
    changed = {name: value for name, value in given.items()
               if name == "learning_rate" or value is not signature.parameters[name].default}
    return changed | further


def _given_arguments(
    signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of a call of `__init__` with their defaults, and its `**keywords`."""
    bound = signature.bind(None, *arguments, **options)
    bound.apply_defaults()
    further = bound.arguments.pop(_keywords_of(signature) or "", {})
    return dict(list(bound.arguments.items())[1:]), further


def _keywords_of(signature: inspect.Signature) -> str | None:
    """Returns the name of the `**keywords` parameter; None without it."""
    return next((name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD),
                None)
