"""The registry of losses, for `compile(loss=...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.core.registry import Registry
from trainer.losses import focal, hinges, probabilistic, regression, sequence, whole_batch
from trainer.losses.base import BuiltinLoss, FunctionLoss, Loss
from trainer.losses.label_functions import check_takes_labels_first

CLASSES: tuple[type[BuiltinLoss], ...] = (
    regression.MeanSquaredError,
    regression.MeanAbsoluteError,
    regression.MeanAbsolutePercentageError,
    regression.MeanSquaredLogarithmicError,
    regression.Huber,
    regression.LogCosh,
    regression.CosineSimilarity,
    probabilistic.BinaryCrossentropy,
    probabilistic.CategoricalCrossentropy,
    probabilistic.SparseCategoricalCrossentropy,
    probabilistic.KLDivergence,
    probabilistic.Poisson,
    hinges.Hinge,
    hinges.SquaredHinge,
    hinges.CategoricalHinge,
    focal.BinaryFocalCrossentropy,
    focal.CategoricalFocalCrossentropy,
    focal.CategoricalGeneralizedCrossEntropy,
    sequence.CTC,
    whole_batch.Circle,
    whole_batch.Dice,
    whole_batch.Tversky,
)

LossOrFunction = Loss | Callable[[Any, Any], Any]
_REGISTRY: Registry[LossOrFunction] = Registry(
    "loss", Loss, "losses", {cls.__name__: cls for cls in CLASSES},
    {name: cls.function for cls in CLASSES for name in (cls.function.__name__, *cls.aliases)},
    expected="the name of a loss, a function of (y_true, y_pred) or a `Loss`")


def get(identifier: object) -> LossOrFunction | None:
    """Returns the loss for an identifier, as Keras does.

    Args:
      identifier: a function's name ("mse", "mean_squared_error"), which gives the function; a class's name or a
        class, which gives a loss with default arguments; a configuration from `serialize`; a `Loss` or a function,
        which is returned unchanged; or None, which gives None.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `identifier` has another type.

    >>> get("mse").__name__
    'mean_squared_error'
    """
    loss: LossOrFunction | None = _REGISTRY.get(identifier)
    return loss


def serialize(loss: LossOrFunction) -> dict[str, Any]:
    """Returns the configuration of a loss or a function, in Keras's format.

    >>> serialize(regression.Huber(delta=2.0))["config"]
    {'name': 'huber_loss', 'reduction': 'sum_over_batch_size', 'delta': 2.0}
    """
    return _REGISTRY.serialize(loss)


def deserialize(
    name: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> LossOrFunction:
    """Returns the loss or the function for a configuration from `serialize`, of this package or of Keras.

    Args:
      name: the configuration, or a name as in `get`.
      custom_objects: custom classes and functions, by name.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `name` is not a configuration.

    >>> deserialize(serialize(regression.Huber(delta=2.0))).delta
    2.0
    """
    return _REGISTRY.deserialize(name, custom_objects)


def is_builtin(function: object) -> bool:
    """Returns whether a function is a loss of this package.

    >>> is_builtin(max)
    False
    """
    return any(cls.function is function for cls in CLASSES)


def as_loss(identifier: object) -> Loss:
    """Returns the `Loss` for a name, a function or a `Loss`. A built-in function gives its class, with its checks.

    Args:
      identifier: see `get`; None is an error. A user's function becomes a loss with the function's name.

    Raises:
      ValueError: if the name is unknown, or a function takes predictions first.
      TypeError: if `identifier` is not a loss, is a function that does not take two arguments, or is a `Loss` that
        overrides `__call__` instead of `call`.

    >>> as_loss("mse").name
    'mean_squared_error'
    """
    found = get(identifier)
    if isinstance(found, Loss):
        if type(found).call is Loss.call and type(found).__call__ is not Loss.__call__:
            raise TypeError(
                f"The loss {type(found).__name__} overrides `__call__`. Define `call(self, y_true, y_pred)` instead, "
                "which returns one value per row: weights and the reduction are then applied to them. For a loss of "
                "the batch as a whole, override `Model.compute_loss`.")
        return found
    if found is None:
        raise _REGISTRY.wrong(identifier)
    for cls in CLASSES:
        if cls.function is found:
            return cls(name=found.__name__)
    check_takes_labels_first("loss", found)
    return FunctionLoss(found)
