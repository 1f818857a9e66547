"""The registry of optimizers: converts a name, an optimizer or an optax transformation to an `Optimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from trainer.core import configs
from trainer.core.registry import Registry
from trainer.optimizers import adagrad, adam, large_models, momentum
from trainer.optimizers.base import Optimizer
from trainer.optimizers.optax_optimizer import from_optax
from trainer.optimizers.update_rule import LossScaleOptimizer

CLASSES: tuple[type[Optimizer], ...] = (
    momentum.SGD, momentum.Lion,
    adam.Adam, adam.AdamW, adam.Nadam, adam.Adamax, adam.Lamb,
    adagrad.Adagrad, adagrad.RMSprop, adagrad.Adadelta, adagrad.Ftrl,
    large_models.Adafactor, large_models.Muon, large_models.ScheduleFreeAdamW,
)

AnyOptimizer = Optimizer | LossScaleOptimizer
_REGISTRY: Registry[AnyOptimizer] = Registry(
    "optimizer", (Optimizer, LossScaleOptimizer), "optimizers", {cls.__name__.lower(): cls for cls in CLASSES},
    ignores_case=True, expected="a name, an optimizer or an optax transformation")


def get(identifier: object) -> AnyOptimizer | None:
    """Returns the optimizer for an identifier; None for None.

    Args:
      identifier: see `as_optimizer`.

    Raises:
      TypeError: if `identifier` is not an optimizer.
      ValueError: if the name is unknown.

    Example:
      >>> get("SGD").learning_rate
      LearningRate(0.01)
    """
    return None if identifier is None else as_optimizer(identifier)


def as_optimizer(identifier: Any, variables: Mapping[Any, Any] | None = None) -> AnyOptimizer:
    """Returns the optimizer for an identifier.

    The updates of an optax transformation are bit-for-bit unchanged until a learning rate is set. Its learning rate is
    the rate with which it was built; if the rate cannot be found, reading and setting it raise. A rate held by
    `optax.inject_hyperparams` is set in the transformation's state. A transformation that needs extra arguments
    receives the loss as `value` and, if available, `grad`, `value_fn` and `grad_fn`; if it needs other arguments, the
    first update raises.

    Args:
      identifier: a Keras name in any case, which gives the optimizer with its defaults; a configuration from
        `serialize`; an optimizer, which is returned unchanged; or an optax transformation or `optax.MultiSteps`.
      variables: the parameters of an NNX module, for labels and masks of optax that are an `nnx.State`.

    Raises:
      TypeError: if `identifier` has another type.
      ValueError: if the name is unknown.

    Example:
      >>> as_optimizer("SGD").learning_rate, as_optimizer(optax.adam(0.25)).learning_rate
      (LearningRate(0.01), LearningRate(0.25))
    """
    if isinstance(identifier, (Optimizer, LossScaleOptimizer)):
        return identifier
    if isinstance(identifier, str) or configs.is_config(identifier):
        return deserialize(identifier)
    if isinstance(identifier, optax.MultiSteps):
        identifier = optax.GradientTransformationExtraArgs(identifier.init, identifier.update)
    if isinstance(identifier, optax.GradientTransformation):
        return from_optax(identifier, variables)
    expected = "`optimizer` must be a name, an optimizer or an optax transformation"
    if callable(identifier):
        # A class such as `Adam`, or a function such as `optax.adam`.
        name = getattr(identifier, "__name__", type(identifier).__name__)
        if name == "schedule":  # as optax names the functions that its schedules return
            raise TypeError(f"{expected}. Received: a function, a schedule of optax. It is the learning rate of an "
                            "optimizer: `optax.adam(schedule)`.")
        raise TypeError(f"{expected}. Received: {name} itself. Call it: {name}(...).")
    if isinstance(getattr(identifier, "tx", None), optax.GradientTransformation):
        raise TypeError(f"{expected}. Received: a value of type {type(identifier).__name__}, which "
                        "updates a module by itself. Give the transformation in it: `optimizer.tx`.")
    raise _REGISTRY.wrong(identifier)


def serialize(optimizer: AnyOptimizer) -> dict[str, Any]:
    """Returns the configuration of an optimizer, without its state, in Keras's format.

    Raises:
      TypeError: if the optimizer is an optax transformation, or its rate is a function.

    Example:
      >>> serialize(momentum.SGD(0.5, momentum=0.9))["config"]["momentum"]
      0.9
    """
    return _REGISTRY.serialize(optimizer)


def deserialize(
    config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> AnyOptimizer:
    """Returns the optimizer for a configuration from `serialize`, of this package or of Keras.

    Args:
      config: the configuration, or a name as in `get`.
      custom_objects: custom classes, by name.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `config` is not a configuration.

    Example:
      >>> deserialize(serialize(momentum.SGD(0.5, momentum=0.9))) == momentum.SGD(0.5, momentum=0.9)
      True
    """
    if (isinstance(config, Mapping) and not configs.is_of_the_user(config)
            and str(config.get("class_name")).lower() == LossScaleOptimizer.__name__.lower()):
        arguments = dict(config["config"])
        inner = deserialize(arguments.pop("inner_optimizer"), custom_objects)
        return LossScaleOptimizer(inner, **arguments)  # type: ignore[arg-type]  # it raises for one within another
    return _REGISTRY.deserialize(config, custom_objects)
