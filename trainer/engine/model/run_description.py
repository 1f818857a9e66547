"""The initial arguments of a run as plain data, for `run.json` and for loggers.

Owns the description of arguments without their contents: arrays by their shapes, objects by their texts. Nothing here
waits for the devices, on which the weights may still be pending.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from trainer.core.errors import describe
from trainer.data.reader import Reader
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.stateful_model import StatefulModel
from trainer.optimizers.named import NamedRules
from trainer.optimizers.update_rule import UpdateRule

_DATA = ("x", "y", "sample_weight", "validation_data")
_UNSHOWN = ("callbacks", "verbose")


def describe_run(
    model: StatefulModel, compile_method: Callable[..., Any], fit_method: Callable[..., Any], given: Mapping[str, Any],
    reader: Reader, validation: Mapping[str, Reader],
) -> dict[str, Any]:
    """Returns the `RunDetails.description` of a starting `fit`.

    Args:
      model: the trained model.
      compile_method: its `compile`, whose default arguments are left out.
      fit_method: its `fit`, likewise.
      given: the arguments of `fit` by name.
      reader: the training batches, before the first is taken.
      validation: the validation batches, by the names of the sets; "" for a set without a name.
    """
    core = core_of(model)
    holder, configuration = core.state, core.configuration
    leaves = jax.tree.leaves(holder.state_or_shapes.params) if holder.is_built else []
    data = {"training": reader.fingerprint(), "validation": None, **{
        f"validation {name!r}" if name else "validation": each.fingerprint() for name, each in validation.items()}}
    fit = {**_not_default(given, fit_method), "epochs": given["epochs"]}
    fit = {name: _text(value) for name, value in fit.items() if name not in (*_DATA, *_UNSHOWN)}
    fit |= {name: _data_text(given[name]) for name in _DATA if given.get(name) is not None}
    return {
        "model": {"name": model.name, "class": type(model).__name__, "parameters": sum(leaf.size for leaf in leaves)},
        "seed": holder.seed, "strategy": repr(model.strategy), "replicas": model.strategy.num_replicas_in_sync,
        "compile": {**_optimizers(configuration.rules),
                    **{name: _text(value) for name, value in _not_default(configuration.given, compile_method).items()
                       if name != "optimizer"}},
        "fit": fit, "data": data}


def _optimizers(rules: UpdateRule | NamedRules | None) -> dict[str, Any]:
    if rules is None:
        return {}
    if isinstance(rules, NamedRules):
        return {"optimizer": {name: _text(rule.optimizer) for name, rule in rules.items()}}
    rate = rules.optimizer.initial_learning_rate
    return {"optimizer": _text(rules.optimizer), **({} if rate is None else {"learning_rate": rate})}


def _not_default(given: Mapping[str, Any], method: Callable[..., Any]) -> dict[str, Any]:
    defaults = {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}
    return {name: value for name, value in given.items() if not (
        value is defaults[name] or (isinstance(value, (bool, int, float, str)) and value == defaults[name]))}


def _data_text(value: object) -> str:
    text = describe(value)
    return repr(value) if text == type(value).__name__ and type(value).__module__.startswith("trainer.") else text


def _text(value: object) -> Any:
    """Returns numbers, texts and None unchanged, containers with converted items, and the texts of other objects."""
    if isinstance(value, Mapping):
        return {str(name): _text(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_text(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe(value)
    if inspect.isroutine(value):
        return getattr(value, "__qualname__", type(value).__name__)
    text = repr(value)
    return type(value).__name__ if " object at 0x" in text or " at 0x" in text else text
