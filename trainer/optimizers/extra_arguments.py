"""The extra arguments of optax transformations in an update, such as the loss.

Owns the choice of arguments: each transformation that accepts a loss receives it; gradients and functions of the loss
are passed only to transformations that require them. A chain passes all arguments to each of its parts, and a line
search rejects unknown arguments, so nothing else is passed unrequested.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import optax

from trainer.core.types import PyTree

# The wording of Python, and of optax for an argument whose default is not usable.
_ASKED_FOR = re.compile(r"missing \d+ required keyword-only arguments?: (.+)|(\w+) must be provided")
_NAME = re.compile(r"\w+")

_FIXES = {
    "value": "Hand over the loss: `state.apply_gradients(grads, value=loss)`.",
    "value_fn": "The default `train_step` hands over functions of the loss with one optimizer, without `microbatches`, "
                "and under a strategy that keeps the state whole on each device, such as `MirroredStrategy`.",
}
_FIXES |= {"grad": _FIXES["value"], "grad_fn": _FIXES["value_fn"]}


def update_with(
    transformation: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree,
    offered: Mapping[str, Any], **given: Any,
) -> tuple[Any, Any]:
    """Calls a transformation's update with the offered arguments that it needs.

    Args:
      transformation: an optax transformation.
      grads: gradients.
      state: state of the transformation.
      params: parameters.
      offered: available extra arguments by name, with the loss as "value".
      **given: arguments that are always passed.

    Raises:
      ValueError: if the transformation needs other arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> params, optimizer = jnp.ones(2), optax.polyak_sgd()
      >>> updates, _ = update_with(optimizer, params, optimizer.init(params), params, {"value": 1.0})
      >>> updates.tolist()
      [-0.5, -0.5]
    """
    def takes(name: str) -> bool:
        return name in offered and _takes(transformation.update, name)

    handed = {name: offered[name] for name in ("value",) if takes(name)}
    while True:
        try:
            return transformation.update(grads, state, params, **given, **handed)
        except (TypeError, ValueError) as error:
            asked = _asked_for(error)
            if not asked:
                raise
            if any(name in handed or not takes(name) for name in asked):
                raise _refused(asked, offered) from error
            handed.update({name: offered[name] for name in asked})


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _asked_for(error: Exception) -> list[str]:
    found = _ASKED_FOR.search(str(error))
    if found is None:
        return []
    return [name for name in _NAME.findall(found[1] or found[2]) if name != "and"]


def _refused(asked: list[str], offered: Mapping[str, Any]) -> ValueError:
    lacking = [name for name in asked if name not in offered] or asked
    fix = next((_FIXES[name] for name in ("value_fn", "grad_fn", "value", "grad") if name in lacking),
               "Make the update in a loop of your own with `strategy.run`.")
    if not set(lacking) - set(offered):
        fix = "The transformation around it does not pass them on."
    return ValueError(f"`optimizer` is an optax transformation whose update also needs {', '.join(map(repr, asked))}, "
                      f"which is not all there. Received here: {', '.join(map(repr, offered))}. {fix}")
