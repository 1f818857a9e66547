"""Learning-rate schedules with Keras's names, arguments and numbers.

Each schedule is a function from the number of updates to a float32 scalar, so it also works with optax's optimizers.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from trainer.core import arguments
from trainer.core.calls.entry_points import foreign_arguments
from trainer.core.calls.public_names import own_names
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import wrong_type
from trainer.core.registry import Registry

_STEPS = "It counts updates, one per batch: `decay_steps=epochs * math.ceil(len(x) / batch_size)` spans a `fit`."
# Arguments that the schedules need, and those of optax and PyTorch.
_ARGUMENTS = {
    "decay_steps": _STEPS,
    "first_decay_steps": "It counts updates, one per batch, to the first restart: `first_decay_steps=math.ceil(len(x) "
                         "/ batch_size)` is an epoch.",
    "decay_rate": "An example: `ExponentialDecay(0.001, decay_steps=1000, decay_rate=0.96)`.",
    **dict.fromkeys(("steps", "total_steps", "transition_steps", "T_max"), f"Give `decay_steps`. {_STEPS}"),
}
_FOREIGN_NAMES = {  # of PyTorch, Hugging Face and optax
    **dict.fromkeys(("CosineAnnealingLR", "CosineAnnealing", "cosine_decay_schedule"),
                    "Instead: `CosineDecay(0.001, decay_steps)`."),
    **dict.fromkeys(("warmup_cosine_decay_schedule", "get_cosine_schedule_with_warmup", "WarmupCosine", "WarmUp",
                     "LinearWarmup"),
                    "Instead: `CosineDecay(0.0, decay_steps, warmup_target=0.001, warmup_steps=1000)`."),
    "CosineAnnealingWarmRestarts": "Instead: `CosineDecayRestarts(0.001, first_decay_steps)`.",
    **dict.fromkeys(("StepLR", "MultiStepLR", "piecewise_constant_schedule"),
                    "Instead: `PiecewiseConstantDecay(boundaries=[1000, 2000], values=[0.1, 0.01, 0.001])`."),
    **dict.fromkeys(("ExponentialLR", "exponential_decay"),
                    "Instead: `ExponentialDecay(0.001, decay_steps, decay_rate=0.96)`."),
    **dict.fromkeys(("LinearLR", "PolynomialLR", "LinearDecay", "linear_schedule", "get_linear_schedule_with_warmup"),
                    "Instead: `PolynomialDecay(0.001, decay_steps, end_learning_rate=0.0)`."),
    **dict.fromkeys(("LambdaLR", "OneCycleLR"), "A schedule is a function: `Adam(lambda step: ...)`, or one of optax."),
    "ReduceLROnPlateau": "It is a callback: `trainer.callbacks.ReduceLROnPlateau`.",
}


class LearningRateSchedule(abc.ABC):
    """A learning rate that depends on the number of updates. Subclasses define `__call__`."""

    @abc.abstractmethod
    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Returns the rate after `step` updates, a float32 scalar; `step` may be traced."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments. Subclasses that are not dataclasses must override this method."""
        if not dataclasses.is_dataclass(self):
            raise NotImplementedError(f"{type(self).__name__} must define `get_config(self)`.")
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a schedule from the result of `get_config`."""
        return cls(**config)


@foreign_arguments(_ARGUMENTS)
@dataclasses.dataclass(frozen=True, eq=False)
class ExponentialDecay(LearningRateSchedule):
    """The initial rate times `decay_rate ** (step / decay_steps)`.

    Args:
      initial_learning_rate: rate of the first update.
      decay_steps: number of updates per factor of `decay_rate`; above 0.
      decay_rate: decay factor.
      staircase: whether the rate changes only at multiples of `decay_steps`.
      name: name of the schedule.

    Raises:
      ValueError: if `decay_steps` is not above 0, or a rate is negative or not finite.

    Example:
      >>> schedule = ExponentialDecay(1.0, decay_steps=10, decay_rate=0.5)
      >>> [float(schedule(step)) for step in (0, 10, 20)]
      [1.0, 0.5, 0.25]
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str = "ExponentialDecay"

    def __post_init__(self) -> None:
        arguments.require_text(name=self.name or "")
        arguments.require_bool(staircase=self.staircase)
        arguments.require_positive(decay_steps=self.decay_steps)
        arguments.require_non_negative(
            initial_learning_rate=self.initial_learning_rate, decay_rate=self.decay_rate)

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        return self.initial_learning_rate * jnp.float32(self.decay_rate) ** _periods(self, step)


@foreign_arguments(_ARGUMENTS)
@dataclasses.dataclass(frozen=True, eq=False)
class InverseTimeDecay(LearningRateSchedule):
    """The initial rate divided by `1 + decay_rate * step / decay_steps`.

    Args:
      initial_learning_rate: rate of the first update.
      decay_steps: number of updates over which the divisor grows by `decay_rate`; above 0.
      decay_rate: growth of the divisor.
      staircase: whether the rate changes only at multiples of `decay_steps`.
      name: name of the schedule.

    Raises:
      ValueError: if `decay_steps` is not above 0, or a rate is negative or not finite.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str = "InverseTimeDecay"

    def __post_init__(self) -> None:
        arguments.require_text(name=self.name or "")
        arguments.require_bool(staircase=self.staircase)
        arguments.require_positive(decay_steps=self.decay_steps)
        arguments.require_non_negative(
            initial_learning_rate=self.initial_learning_rate, decay_rate=self.decay_rate)

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        return self.initial_learning_rate / (1 + self.decay_rate * _periods(self, step))


@foreign_arguments(_ARGUMENTS)
@dataclasses.dataclass(frozen=True, eq=False)
class PiecewiseConstantDecay(LearningRateSchedule):
    """A piecewise constant rate: `values[0]` up to and including update `boundaries[0]`, then `values[1]`, and so on.

    Args:
      boundaries: update numbers in ascending order.
      values: rates, with one entry more than `boundaries`.
      name: name of the schedule.

    Raises:
      ValueError: if the lengths do not match, `boundaries` is not ascending, or a rate is negative or not finite.

    Example:
      >>> schedule = PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.25])
      >>> [float(schedule(step)) for step in (10, 11, 21)]
      [1.0, 0.5, 0.25]
    """

    boundaries: Sequence[float]
    values: Sequence[float]
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        arguments.require_text(name=self.name or "")
        for name, numbers in (("boundaries", self.boundaries), ("values", self.values)):
            if not hasattr(numbers, "__len__"):
                raise wrong_type(name, numbers, "a list of numbers")
        if len(self.boundaries) != len(self.values) - 1:
            raise ValueError("`values` must have one entry more than `boundaries`. Received: "
                             f"{len(self.boundaries)} boundaries and {len(self.values)} values.")
        if list(self.boundaries) != sorted(self.boundaries):
            raise ValueError(f"`boundaries` must ascend. Received: boundaries={list(self.boundaries)}.")
        for value in self.values:
            arguments.require_non_negative(values=value)

    def __call__(self, step: Any) -> jax.Array:
        passed = sum((jnp.asarray(step > boundary, jnp.int32) for boundary in self.boundaries), start=0)
        return jnp.asarray(self.values, jnp.float32)[passed]


@foreign_arguments(_ARGUMENTS)
@dataclasses.dataclass(frozen=True, eq=False)
class PolynomialDecay(LearningRateSchedule):
    """A polynomial decay from the initial to the end rate in `decay_steps` updates.

    Args:
      initial_learning_rate: rate of the first update.
      decay_steps: number of updates until the end rate; above 0.
      end_learning_rate: rate after the decay.
      power: power of the remaining share of `decay_steps`; 1 gives a linear decay.
      cycle: whether to continue after the end, by extending the decay at each multiple of `decay_steps` to the next
        multiple.
      name: name of the schedule.

    Raises:
      ValueError: if `decay_steps` is not above 0, or a rate is negative or not finite.

    Example:
      >>> schedule = PolynomialDecay(1.0, decay_steps=4, end_learning_rate=0.0)
      >>> [float(schedule(step)) for step in (0, 1, 4, 5)]
      [1.0, 0.75, 0.0, 0.0]
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def __post_init__(self) -> None:
        arguments.require_text(name=self.name or "")
        arguments.require_bool(cycle=self.cycle)
        arguments.require_positive(decay_steps=self.decay_steps)
        arguments.require_non_negative(
            initial_learning_rate=self.initial_learning_rate, end_learning_rate=self.end_learning_rate,
            power=self.power)

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        periods = jnp.maximum(1.0, jnp.ceil(step / self.decay_steps)) if self.cycle else 1.0
        # The bound is for steps after the end, and for rounding below 0, where powers are NaN.
        left = jnp.maximum(1 - step / (periods * self.decay_steps), 0.0)
        height = self.initial_learning_rate - self.end_learning_rate
        return height * left ** jnp.float32(self.power) + self.end_learning_rate


@foreign_arguments(_ARGUMENTS)
@dataclasses.dataclass(frozen=True, eq=False)
class CosineDecay(LearningRateSchedule):
    """A linear warm-up to `warmup_target`, if given, followed by a cosine decay to a share of the peak.

    Args:
      initial_learning_rate: rate of the first update; the peak if there is no warm-up.
      decay_steps: number of updates from the peak to the end; above 0.
      alpha: final rate, as a share of the peak.
      name: name of the schedule.
      warmup_target: the peak; None for no warm-up.
      warmup_steps: number of updates until the peak.

    Raises:
      ValueError: if `decay_steps` is not above 0, or another number is negative or not finite.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.

    Example:
      >>> schedule = CosineDecay(0.0, decay_steps=10, warmup_target=1.0, warmup_steps=4)
      >>> [float(schedule(step)) for step in (0, 2, 4, 14)]
      [0.0, 0.5, 1.0, 0.0]
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    name: str = "CosineDecay"
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        arguments.require_text(name=self.name or "")
        arguments.require_positive(decay_steps=self.decay_steps)
        arguments.require_non_negative(
            warmup_steps=self.warmup_steps, initial_learning_rate=self.initial_learning_rate, alpha=self.alpha)
        if self.warmup_target is not None:
            arguments.require_non_negative(warmup_target=self.warmup_target)
        elif self.warmup_steps:
            warnings.warn(f"`warmup_steps={self.warmup_steps}` has no effect without `warmup_target`, the rate after "
                          "the warm-up: `CosineDecay(0.0, decay_steps, warmup_target=rate, warmup_steps=...)`.",
                          stacklevel=user_stacklevel())

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        if self.warmup_target is None:
            return self._decayed(step, self.initial_learning_rate)
        climb = self.warmup_target - self.initial_learning_rate
        # Without warm-up steps this branch is computed but not selected; it must not divide by 0.
        warming_up = climb * (step / max(self.warmup_steps, 1)) + self.initial_learning_rate
        return jnp.where(
            step < self.warmup_steps, warming_up, self._decayed(step - self.warmup_steps, self.warmup_target))

    def _decayed(self, step: jax.Array, peak: float) -> jax.Array:
        return peak * _half_cosine(jnp.minimum(step, self.decay_steps) / self.decay_steps, self.alpha)


@foreign_arguments(_ARGUMENTS)
@dataclasses.dataclass(frozen=True, eq=False)
class CosineDecayRestarts(LearningRateSchedule):
    """A repeated cosine decay to a share of the initial rate, with periods and peaks that scale at each restart.

    Args:
      initial_learning_rate: rate of the first update, and the first peak.
      first_decay_steps: number of updates until the first restart; above 0.
      t_mul: factor of the length of the period at each restart; at least 1.
      m_mul: factor of the peak at each restart.
      alpha: rate at the end of each period, as a share of the initial rate.
      name: name of the schedule.

    Raises:
      ValueError: if `first_decay_steps` is not above 0, `t_mul` is below 1, or a rate is negative or not finite.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.

    Example:
      >>> schedule = CosineDecayRestarts(1.0, first_decay_steps=2)
      >>> [round(float(schedule(step)), 3) for step in range(7)]
      [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str = "SGDRDecay"

    def __post_init__(self) -> None:
        arguments.require_text(name=self.name or "")
        arguments.require_positive(first_decay_steps=self.first_decay_steps)
        arguments.require_non_negative(
            initial_learning_rate=self.initial_learning_rate, m_mul=self.m_mul, alpha=self.alpha)
        arguments.require({"t_mul": self.t_mul}, "a number of at least 1", lambda number: number >= 1)

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        periods = jnp.asarray(step, jnp.float32) / self.first_decay_steps  # in units of the first period
        if self.t_mul == 1:
            restarts = jnp.floor(periods)
            fraction = periods - restarts
        else:
            # Period n starts at the geometric sum (t_mul ** n - 1) / (t_mul - 1), and has length t_mul ** n.
            restarts = jnp.floor(jnp.log(1 + periods * (self.t_mul - 1)) / jnp.log(jnp.float32(self.t_mul)))
            length = jnp.float32(self.t_mul) ** restarts
            fraction = (periods - (length - 1) / (self.t_mul - 1)) / length
        peak = jnp.float32(self.m_mul) ** restarts
        return self.initial_learning_rate * _half_cosine(fraction, self.alpha, peak)


def serialize(learning_rate_schedule: LearningRateSchedule) -> dict[str, Any]:
    """Returns the configuration of a schedule, in Keras's format.

    Example:
      >>> serialize(CosineDecay(0.5, decay_steps=10))["config"]["decay_steps"]
      10
    """
    return _REGISTRY.serialize(learning_rate_schedule)


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> LearningRateSchedule:
    """Returns the schedule for a configuration from `serialize`, of this package or of Keras.

    Args:
      config: the configuration.
      custom_objects: custom classes, by name.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `config` is not a configuration.

    Example:
      >>> float(deserialize(serialize(CosineDecay(0.5, decay_steps=10)))(0))
      0.5
    """
    return _REGISTRY.deserialize(config, custom_objects)


_REGISTRY: Registry[LearningRateSchedule] = Registry(
    "schedule", LearningRateSchedule, "optimizers.schedules", {cls.__name__: cls for cls in (
        CosineDecay, CosineDecayRestarts, ExponentialDecay, InverseTimeDecay, PiecewiseConstantDecay, PolynomialDecay)})


def _periods(schedule: ExponentialDecay | InverseTimeDecay, step: jax.typing.ArrayLike) -> jax.Array:
    periods = jnp.asarray(step, jnp.float32) / schedule.decay_steps
    return jnp.floor(periods) if schedule.staircase else periods


def _half_cosine(fraction: jax.Array, alpha: float, peak: jax.Array | float = 1.0) -> jax.Array:
    """Returns the cosine decay to `alpha` as `fraction` goes from 0 to 1; `peak` scales the height above `alpha`."""
    return (1 - alpha) * (0.5 * peak * (1 + jnp.cos(math.pi * fraction))) + alpha


__getattr__, __dir__, __all__ = own_names(__name__, _FOREIGN_NAMES)
