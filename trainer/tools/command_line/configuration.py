"""The configuration of `python -m trainer fit`: its sections, and the types of the objects that it names.

Owns the parser. The syntax, the errors and the making of objects are jsonargparse's: a key is an argument of a method
or of a class, typed by its annotation. Objects are made by class paths, so a configuration runs the code that it names.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jsonargparse
import optax
from flax import linen as nn
from flax import nnx
from jsonargparse.typing import NonNegativeInt, register_type

from trainer import callbacks, distribute, losses, metrics, optimizers, regularizers
from trainer.core.errors import near_hint
from trainer.engine.model.model import Model

MODEL, DATA = "model", "data"
_HINTS = {
    MODEL: "`model` is a class of Flax or a `trainer.Model`, or a function with such an annotation of its result, such "
           "as `def model(width: int = 64) -> trainer.Model`.",
    DATA: "`data` is a function whose result is annotated as a plain `dict`, such as `def data(rows: int = 100) -> "
          "dict`, which returns `{\"train\": (x, y)}`, or a class with a property `train`.",
}
_RATE = "It is an argument of the optimizer: `--compile.optimizer Adam --compile.optimizer.learning_rate 0.01`."
_OTHER_PLACES = {"fit": "The arguments of `fit` are in the section 'trainer'.", "learning_rate": _RATE, "lr": _RATE}
# jsonargparse's error of an argument of a class that no option before it names: it takes the type for the class.
_OF_OTHER_KIND = re.compile(r"Import path (\S+) does not correspond to a subclass of (?:Network|DataSets)")
_NO_CLASS_YET = re.compile(rf'Parser key "(\w+)":\s+Import path {re.escape(__name__)}\.\w+ does not correspond')
# jsonargparse's errors of keys: at the top, in a group, and of a command line.
_UNKNOWN_KEY = re.compile(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'(?: is not accepted)?$|"
                          r"unrecognized arguments: --([^ =]+)")
_OF_A_LIST = re.compile(r"- Expected a <class 'list'>(?:.*\n)*  Given value type: <class 'str'>\n  Given value: (.*)")
_OF_A_DICT = re.compile(r"\n  Given value type: <class 'dict'>\n  Given value: \{(?!.*'class_path')")
_NEAR = re.compile(r"\S.* Did you mean '.*$", re.MULTILINE)
_NO_KEY = re.compile(r"unrecognized arguments: ([^-\s]\S*)")
_REQUIRED = re.compile(r"arguments are required: (.*)")


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
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)")
_UNKNOWN_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")


def _near_classes(message: str) -> str:
    """Returns a line with similar names for an error about the name of a class or a function, or an empty string."""
    if short := _UNKNOWN_CLASS.search(message):
        if section := next((name for name in _HINTS if f'key "{name}"' in message), None):
            return f"{short[1]!r} is {_described(short[1])}\n{_HINTS[section]}"
        return near_hint(short[1], [name for room in _ROOMS for name in room.__all__ if name[0].isupper()])
    if (path := _UNKNOWN_ATTRIBUTE.search(message)) and path[1] in sys.modules:
        return near_hint(path[2], [name for name in dir(sys.modules[path[1]]) if not name.startswith("_")])
    return ""


def _described(path: str) -> str:
    """Returns the kind of the object at a class path, and the annotation of a function's result."""
    if "." not in path:
        return f"a name without that of its Python file: `my_file.{path}`"
    found = pkgutil.resolve_name(path)
    if isinstance(found, type) or not callable(found):
        return f"the class {found.__name__}" if isinstance(found, type) else f"a value of type {type(found).__name__}"
    result = inspect.signature(found).return_annotation
    if result is inspect.Signature.empty:
        return "a function without an annotation of its result"
    return f"a function whose result is annotated as {inspect.formatannotation(result)}"


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors suggest keys and list the kinds of models and data.

    jsonargparse makes such parsers for the arguments of nested classes, too.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if early := _NO_CLASS_YET.match(message):
            section = early[1]
            message = (f'Parser key "{section}":\n  An argument `--{section}.KEY` comes before the class that it is '
                       f"of. Give `--config FILE`, or `--{section} CLASS` first: options are read in order.")
        if other := _OF_OTHER_KIND.search(message):
            hints = [hint for section, hint in _HINTS.items() if f'key "{section}"' in message]
            message = "\n".join([message.replace(other[0], f"{other[1]!r} is {_described(other[1])}"), *hints])
        if missing := _REQUIRED.search(message):
            message = "\n".join([message, "`--config FILE` gives them, such as the `config.yaml` of a run's folder.",
                                 *(_HINTS[name] for name in missing[1].split(", ") if name in _HINTS)])
        if stray := _NO_KEY.match(message):
            message = f"{message}. An argument is `--KEY VALUE`; a file is `--config {stray[1]}`."
        if message.count("\n") > 4 and (nested := _NEAR.search(message)):  # of one of the kinds that a value can have
            message = f"{message}\n{nested[0]}"
        if name := _OF_A_LIST.search(message):
            message = f"{message}\nWrite a list: `[{name[1]}]`."
        if _OF_A_DICT.search(message):
            message = (f"{message}\nAn object is `{{class_path: Adam, init_args: {{learning_rate: 0.01}}}}`; a name "
                       "alone is `adam`.")
        if near := _near_classes(message):
            message = f"{message}\n{near}"
        if unknown := _UNKNOWN_KEY.match(message):
            key = ".".join(filter(None, unknown.groups()))
            known = {action.dest for action in self._actions} - {"help", "print_config"}
            sections = {name.partition(".")[0] for name in known}
            section = key.partition(".")[0]
            if section not in sections:
                deeper = {name for name in known if name.endswith(f".{section}")}
                key, known = section, deeper or sections
            place = _OTHER_PLACES.get(key.rpartition(".")[2]) if "compile" in sections else None  # not of a class
            message = f"{message}. {place or near_hint(key, known)}"
        super().error(message, ex)
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
