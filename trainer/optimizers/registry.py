"""From what users give for an optimizer (a name, an optimizer, an optax transformation) to an `Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax

from trainer.core import configs, errors
from trainer.optimizers.adagrad import Adadelta, Adagrad, Ftrl, RMSprop
from trainer.optimizers.adam import Adam, Adamax, AdamW, Lamb, Nadam
from trainer.optimizers.base import Optimizer
from trainer.optimizers.large_models import Adafactor, Muon, ScheduleFreeAdamW
from trainer.optimizers.momentum import SGD, Lion
from trainer.optimizers.optax_optimizer import from_optax
from trainer.optimizers.update_rule import LossScaleOptimizer

BY_NAME: dict[str, Callable[[], Optimizer]] = {
    made.__name__.lower(): made
    for made in (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Nadam, Adamax, Lion, Lamb, Ftrl, Adafactor, Muon,
                 ScheduleFreeAdamW)
}


AnyOptimizer = Optimizer | LossScaleOptimizer


def get(identifier: Any) -> AnyOptimizer | None:
    """Returns the optimizer that `identifier` stands for; None for None.

    Args:
      identifier: see `as_optimizer`.

    Raises:
      TypeError: for what is no optimizer.
      ValueError: if the name is unknown.

    Example:
      >>> get("SGD").learning_rate
      LearningRate(0.01)
    """
    return None if identifier is None else as_optimizer(identifier)


def as_optimizer(identifier: Any) -> AnyOptimizer:
    """Returns the optimizer that `identifier` stands for.

    Args:
      identifier: a Keras name in any case, for that optimizer with its defaults; a configuration, as `serialize`
        returns it; an optimizer, returned as it is; or
        an optax transformation or `optax.MultiSteps`, whose updates stay what they are, bit for bit, until a learning
        rate is set. Its rate reads as the rate that it was built with. Where that cannot be found, reading and
        setting it raise. A rate under `optax.inject_hyperparams` is set in the transformation's own state. A
        transformation that needs further arguments gets the loss as `value` and, where they can be had, `grad`,
        `value_fn` and `grad_fn`; one that asks for others raises at the first update.

    Raises:
      TypeError: if it is none of these.
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
        return from_optax(identifier)
    expected = "a name, an optimizer or an optax transformation"
    if callable(identifier):
        # A class such as `Adam`, or a function such as `optax.adam`.
        name = getattr(identifier, "__name__", type(identifier).__name__)
        raise TypeError(f"`optimizer` must be {expected}. Received: {name} itself. Call it: {name}(...).")
    if isinstance(getattr(identifier, "tx", None), optax.GradientTransformation):
        raise TypeError(f"`optimizer` must be {expected}. Received: a value of type {type(identifier).__name__}, which "
                        "updates a module by itself. Give the transformation in it: `optimizer.tx`.")
    raise errors.wrong_type("optimizer", identifier, expected)


def serialize(optimizer: AnyOptimizer) -> dict[str, Any]:
    """Returns an optimizer as plain data, in Keras's form; without its state.

    Raises:
      TypeError: for an optax transformation, or a rate that is a function.

    Example:
      >>> serialize(SGD(0.5, momentum=0.9))["config"]["momentum"]
      0.9
    """
    config: dict[str, Any] = configs.to_config(optimizer, "optimizers")
    return config


def deserialize(
    config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> AnyOptimizer:
    """Returns the optimizer that `serialize`, or that of Keras, has made plain data of.

    Args:
      config: the configuration, or a name as `get` takes it.
      custom_objects: classes of your own, by name.

    Raises:
      ValueError: for an unknown name.
      TypeError: for what is no configuration.

    Example:
      >>> deserialize(serialize(SGD(0.5, momentum=0.9))) == SGD(0.5, momentum=0.9)
      True
    """
    custom = configs.with_custom_objects({}, custom_objects)
    if isinstance(config, str):
        config = config if config in custom else config.lower()
    elif isinstance(config, Mapping) and not configs.is_of_the_user(config) and config.get("class_name") not in custom:
        config = {**config, "class_name": str(config.get("class_name")).lower()}
        if config["class_name"] == LossScaleOptimizer.__name__.lower():
            arguments = dict(config["config"])
            inner = deserialize(arguments.pop("inner_optimizer"), custom_objects)
            return LossScaleOptimizer(inner, **arguments)  # type: ignore[arg-type]  # it raises for one within another
    optimizer: Optimizer = configs.from_config(
        "optimizer", (Optimizer, LossScaleOptimizer), config, BY_NAME, custom_objects)
    return optimizer
