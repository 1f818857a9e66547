"""The further arguments that optax transformations may ask for in an update, such as the loss.

Owns what is handed to which of them: a loss to all that take one, and to those that cannot do without the gradients or
a function of the loss, these too. A chain passes all that it is handed on to each of its parts, and a line search
rejects what it does not know: so nothing else is handed over unasked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import optax

from trainer.core.types import PyTree

# As Python words it, and optax where an argument has a default in vain.
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
    """Returns what a transformation's update returns, handed those of the offered arguments that it asks for.

    Args:
      transformation: an optax transformation.
      grads: the gradients.
      state: the transformation's state.
      params: the parameters.
      offered: the loss as "value", and by name what else there is.
      **given: arguments that the transformation takes in any case.

    Raises:
      ValueError: if it asks for others.

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
