"""Calls of `model_fn` and `input_fn`, with the arguments that each function accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax.errors import FlaxError

from trainer.core import arguments, errors
from trainer.core.types import PyTree
from trainer.estimator.training.spec import EstimatorSpec, Mode, ModelFn

_OF_MODEL_FN = ("features", "labels", "mode", "params", "config")
_OF_INPUT_FN = ("mode", "params", "config")


InputFn = Callable[..., Any]


def check_steps(**counts: int | None) -> None:
    """Checks numbers of steps, by argument name; None means no limit.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a number is less than 1.
    """
    for name, count in counts.items():
        if count is not None:
            arguments.as_count(name, count, 1, f"a whole number of at least 1: must specify {name} > 0")


def check_input_fn(input_fn: object) -> InputFn:
    """Returns an `input_fn`; raises TypeError if it is not a function."""
    if not callable(input_fn):
        raise errors.wrong_type("input_fn", input_fn, "a function that returns data, such as "
                                "`lambda: trainer.data.Dataset.from_arrays((features, labels)).batch(32)`")
    return input_fn


def check_receiver(serving_input_receiver_fn: object) -> None:
    """Raises TypeError if a `serving_input_receiver_fn` is not a function."""
    if not callable(serving_input_receiver_fn):
        raise errors.wrong_type("serving_input_receiver_fn", serving_input_receiver_fn,
                                "a function that returns some rows of features")


def check_model_fn(model_fn: object, params: Mapping[str, Any] | None) -> ModelFn:
    """Returns a `model_fn` after checking its arguments.

    Args:
      model_fn: function `(features, labels, mode, params, config)`, with all arguments except `features` optional.
      params: the `params` argument of the estimator.

    Raises:
      TypeError: if `model_fn` is not a function.
      ValueError: if `model_fn` lacks `features`, lacks `params` although they are given, or has unknown arguments.
    """
    if not callable(model_fn):
        raise errors.wrong_type("model_fn", model_fn, "a function (features, labels, mode) that "
                                "returns an `EstimatorSpec`")
    names, takes_all = _names(model_fn)
    if "features" not in names and not takes_all:
        raise ValueError(f"model_fn ({_text(model_fn)}) must include features argument.")
    if params is not None and "params" not in names and not takes_all:
        raise ValueError(f"model_fn ({_text(model_fn)}) does not include params argument, but params "
                         f"({sorted(map(str, params))}) is passed to Estimator.")
    unknown = sorted(_required(model_fn) - set(_OF_MODEL_FN))
    if unknown:
        raise ValueError(f"model_fn ({_text(model_fn)}) has following not expected args: {unknown}. It may have: "
                         f"{', '.join(_OF_MODEL_FN)}.")
    return model_fn


def call_model_fn(model_fn: ModelFn, features: PyTree, labels: PyTree, mode: Mode, params: Mapping[str, Any] | None,
                  config: object) -> EstimatorSpec:
    """Returns the spec of a `model_fn` for a mode.

    Raises:
      ValueError: if there are labels that `model_fn` does not accept, or the spec has another mode.
      TypeError: if the result is not an `EstimatorSpec`, or `model_fn` calls a module without its variables.
    """
    names, takes_all = _names(model_fn)
    if labels is not None and "labels" not in names and not takes_all:
        raise ValueError(f"model_fn ({_text(model_fn)}) does not take labels, but input_fn returns labels. Give it an "
                         "argument `labels`.")
    values = {"features": features, "labels": labels, "mode": mode, "params": params, "config": config}
    try:
        spec = _called(model_fn, values)
    except FlaxError as error:
        raise TypeError(f"model_fn ({_text(model_fn)}) calls a module, which has no variables yet "
                        f"({type(error).__name__}). Return the module, uncalled: "
                        "`EstimatorSpec(mode, module=nn.Dense(3), loss=..., optimizer=...)`.") from error
    if not isinstance(spec, EstimatorSpec):
        raise errors.wrong_type("the result of model_fn", spec, "an `EstimatorSpec`")
    if spec.mode != mode:
        raise ValueError(f"model_fn returned a spec of mode {spec.mode!r}. Expected: {mode!r}, the mode that it was "
                         "called with.")
    return spec


def call_input_fn(input_fn: Any, mode: Mode, params: Any, config: Any) -> Any:
    """Returns the data of an `input_fn`.

    Raises:
      TypeError: if `input_fn` is not a function.
      ValueError: if it requires arguments other than `mode`, `params` and `config`.
    """
    check_input_fn(input_fn)
    if "input_context" in _required(input_fn):
        raise ValueError("input_fn takes an `input_context`, by which TensorFlow shards the input. Here each process "
                         "reads the same batches and takes its rows of them: return the whole dataset, and leave the "
                         "argument out.")
    unknown = sorted(_required(input_fn) - set(_OF_INPUT_FN))
    if unknown:
        raise ValueError(f"input_fn ({_text(input_fn)}) has following not expected args: {unknown}. It may have: "
                         f"{', '.join(_OF_INPUT_FN)}.")
    return _called(input_fn, {"mode": mode, "params": params, "config": config})


def _called(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    names, takes_all = _names(function)
    return function(**{name: value for name, value in values.items() if name in names or takes_all})


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    return inspect.signature(function).parameters.values()


def _names(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Returns the names of a function's arguments, and whether it accepts arbitrary keyword arguments."""
    kinds = {parameter.name: parameter.kind for parameter in _parameters(function)}
    return set(kinds), inspect.Parameter.VAR_KEYWORD in kinds.values()


def _required(function: Callable[..., Any]) -> set[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {parameter.name for parameter in _parameters(function)
            if parameter.default is inspect.Parameter.empty and parameter.kind not in variable}


def _text(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
