"""The configuration of `python -m trainer fit`: its sections, and the types of the objects that it names.

Owns the parser. The syntax, the errors and the making of objects are jsonargparse's: a key is an argument of a method
or of a class, typed by its annotation. Objects are made by class paths, so a configuration runs the code that it names.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jsonargparse
import optax
from flax import linen as nn
from flax import nnx
from jsonargparse.typing import NonNegativeInt, register_type

from trainer import callbacks, distribute, losses, metrics, optimizers, regularizers
from trainer.engine.model.model import Model
from trainer.tools.command_line.parser_errors import DATA, MODEL, explained


class _KindType(type):
    """The type of a kind of objects, whose subclasses are other classes.

    jsonargparse takes a class for an annotation if it is a subclass, and a function if its annotated result is. A kind
    is a single annotation, whose errors name the fault; errors of a union repeat it for each part.
    """

    of: tuple[type, ...] = ()
    attribute: str | None = None
    has_names = False

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.of) or (cls.attribute is not None and hasattr(other, cls.attribute))

    def __instancecheck__(cls, value: object) -> bool:
        # Dicts and namespaces say by a class path how an object is made.
        return not isinstance(value, (dict, jsonargparse.Namespace)) and issubclass(type(value), cls)

    def __subclasses__(cls) -> list[type]:  # for short names, such as "Adam"
        return list(cls.of) if cls.has_names else []


class Network(metaclass=_KindType):
    """A Flax module or a `trainer.Model`."""

    of = (nn.Module, nnx.Module, Model)


class DataSets(metaclass=_KindType):
    """Data sets by name: a mapping, or an object with an attribute "train"."""

    of, attribute = (Mapping,), "train"


class OptimizerObject(metaclass=_KindType):
    """An optimizer of `trainer.optimizers` or of optax."""

    of, has_names = (optimizers.Optimizer, optax.GradientTransformation, optax.MultiSteps), True


class OptimizerName(str):
    """A Keras name of an optimizer."""


class LossName(str):
    """A Keras name of a loss."""


class MetricName(str):
    """A Keras name of a metric."""


class PenaltyName(str):
    """A Keras name of a regularizer."""


def _registered(get: Callable[[str], object]) -> Callable[[str], str]:
    """Returns the check of a name, which leaves it as it is. Paths, which have dots, are not names."""
    def checked(value: str) -> str:
        if not isinstance(value, str) or "." in value:
            raise ValueError(f"Expected a name without dots. Got value: {value}")
        get(value)
        return value
    return checked


register_type(OptimizerName, str, _registered(optimizers.get))
register_type(LossName, str, _registered(losses.get))
register_type(PenaltyName, str, _registered(regularizers.get))
register_type(MetricName, str, _registered(str))  # `compile` knows more names than `metrics.get`, such as "acc"

_Optimizer = OptimizerObject | OptimizerName
_Loss = losses.Loss | Callable[[Any, Any], Any] | LossName
_Metrics = list[metrics.Metric | Callable[[Any, Any], Any] | MetricName]


def _general(*, run: str = "run", seed: NonNegativeInt = 0, strategy: distribute.Strategy | None = None, model: Network,
             data: DataSets) -> None:
    """General arguments.

    Args:
      run: folder of the run.
      seed: seed of `trainer.utils.set_random_seed`, which is called before anything is made.
      strategy: the strategy in whose scope everything is made.
      model: the class of a module or a model, or a function that returns a module or a model.
      data: a function that returns a dict with the data sets "train", "validation", "test" and "predict", as `fit`
        takes them, or a class with such attributes.
    """


def _compile(
    optimizer: _Optimizer | dict[str, _Optimizer] = "rmsprop",  # type: ignore[assignment]  # a name
    loss: _Loss | dict[str, _Loss] | None = None, metrics: _Metrics | dict[str, _Metrics] | None = None,
    weighted_metrics: _Metrics | dict[str, _Metrics] | None = None,
    regularizers: dict[str, regularizers.Regularizer | PenaltyName] | None = None,
) -> None:
    """Arguments of `compile`.

    Args:
      optimizer: a Keras name, an optimizer of `trainer.optimizers` or of optax, or a dict of these.
      loss: a Keras name, a loss of `trainer.losses` or a function, or a dict of these.
      metrics: a list of names, metrics and functions, or a dict of such lists.
      weighted_metrics: the same, for metrics that use sample weights.
      regularizers: penalties of weights, by path patterns.
    """


def _fit(callbacks: list[callbacks.Callback] = []) -> None:  # noqa: B006  # is only read, as the default that is shown
    """Arguments of `fit`.

    Args:
      callbacks: a list of callbacks, beside those for the run's folder.
    """


_ROOMS = (callbacks, distribute, losses, metrics, optimizers, regularizers)


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors suggest keys and list the kinds of models and data.

    jsonargparse makes such parsers for the arguments of nested classes, too.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        keys = {action.dest for action in self._actions} - {"help", "print_config"}
        classes = [name for room in _ROOMS for name in room.__all__ if name[0].isupper()]
        super().error(explained(message, keys, classes), ex)
        raise AssertionError("jsonargparse ends the process or raises")


def parser_of(command: str, description: str) -> Parser:
    """Returns the parser of a command, with the sections that all commands share."""
    parser = Parser(prog=f"python -m trainer {command}", description=description, allow_abbrev=False,
                    usage="%(prog)s [--config FILE] [--KEY VALUE ...]")
    for room in _ROOMS:
        for name in room.__all__:
            getattr(room, name)  # imported, so that its short name is known
    parser.add_argument("--config", action="config", help="file with a configuration")
    # Only Flax sets the parent of a module.
    parser.add_function_arguments(_general, skip={"model.init_args.parent"})
    parser.add_function_arguments(_compile, "compile")
    parser.add_function_arguments(_fit, "trainer")
    groups: Any = parser.groups
    groups["compile"].add_method_arguments(Model, "compile", "compile", as_group=False, skip=_names(_compile))
    groups["trainer"].add_method_arguments(Model, "fit", "trainer", as_group=False,
                                           skip={"x", "y", "validation_data", "sample_weight", *_names(_fit)})
    parser.add_class_arguments(callbacks.BackupAndRestore, "backup", skip={"backup_dir", "delete_checkpoint"},
                               instantiate=False)
    return parser


def _names(function: Callable[..., None]) -> set[str]:
    return set(inspect.signature(function).parameters)


def parsed(parser: Parser, arguments: Sequence[str]) -> jsonargparse.Namespace:
    """Returns the options of a command line; ends the process with exit code 2 if an option is wrong.

    An argument overrides the files of `--config`, wherever it stands: jsonargparse reads in order, so files come first.
    jsonargparse takes any value for a parameter without an annotation: these are refused.
    """
    options = parser.parse_args(_files_first(arguments))
    for section in (MODEL, DATA):
        made = options[section]
        parameters = inspect.signature(pkgutil.resolve_name(made.class_path)).parameters
        for name, parameter in parameters.items():
            if parameter.annotation is inspect.Parameter.empty and f"init_args.{name}" in made:
                parser.error(f'Parser key "{section}":\n  The parameter {name!r} of {made.class_path!r} has no '
                             f"annotation, so that its values cannot be checked. Write its type: `{name}: int`.")
    return options


def _files_first(arguments: Sequence[str]) -> list[str]:
    files: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            files += [argument, *itertools.islice(rest, 1)]
        else:
            (files if argument.startswith("--config=") else others).append(argument)
    return [*files, *others]
