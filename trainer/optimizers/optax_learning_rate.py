"""Detection of the learning rate of a plain optax transformation.

Optax keeps a rate only in the closures of its functions. Only this module reads them, and it gives up rather than
guess. From the last stage of a chain backwards, the rate is the product of all scales up to a normalizing stage, whose
output does not depend on earlier scales. Before a stage that neither normalizes nor is linear, such as clipping, a
scale makes the rate unknown, because its effect depends on the gradient. A wrapper has the rate of its inner
transformation. A stage that is not in the tables below makes the rate unknown.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import optax

from trainer.core.identity import configuration_key
from trainer.optimizers.learning_rate import Schedule

# A doubled gradient doubles the update.
LINEAR = frozenset({
    "centralize", "ema", "identity", "scale_by_optimistic_gradient", "scale_by_param_block_rms", "set_to_zero", "trace",
    "zero_nans",
})  # fmt: skip
# A doubled gradient gives the same update.
NORMALIZING = frozenset({
    "normalize_by_update_norm", "scale_by_adadelta", "scale_by_adam", "scale_by_adamax", "scale_by_adan",
    "scale_by_amsgrad", "scale_by_belief", "scale_by_factored_rms", "scale_by_lion", "scale_by_novograd",
    "scale_by_rms", "scale_by_rss", "scale_by_sign", "scale_by_sm3", "scale_by_stddev",
    "scale_by_trust_ratio", "scale_by_yogi",
})  # fmt: skip
# Neither linear nor normalizing, but without a rate.
OTHER = frozenset({
    "adaptive_grad_clip", "add_decayed_weights", "add_noise", "clip", "clip_by_block_rms", "clip_by_global_norm",
    "scale_by_radam",
})  # fmt: skip
# The variable in which a wrapper holds its inner transformation, or its transformations by label.
WRAPPERS = {
    "MultiSteps": "_opt", "apply_if_finite": "inner", "lookahead": "fast_optimizer", "masked": "inner",
    "partition": "transforms",
}  # fmt: skip
# Part of their updates does not depend on the rate: gradients outside the mask, or the move to the slow parameters.
PARTLY_SCALED = frozenset({"lookahead", "masked"})


class FoundRate(NamedTuple):
    """A learning rate found in a transformation.

    Attributes:
      value: a float, or a schedule from the number of updates to the rate.
      injected: number of places where `optax.inject_hyperparams` keeps the rate in the transformation's state.
      scales_updates: whether a change of the rate is equivalent to a scaling of the final updates.
    """

    value: float | Schedule
    injected: int = 0
    scales_updates: bool = True


class _Stage(NamedTuple):
    """A transformation in a chain: the function that made it, and the closure of its two functions.

    Attributes:
      maker: name of the optax function; the prefix "the user's " marks other functions.
      closure: values by name; for objects with methods, their attributes.
    """

    maker: str
    closure: dict[str, Any]


def find_learning_rate(transformation: optax.GradientTransformation) -> FoundRate | None:
    """Returns the learning rate of `transformation`, or None if it is not certain.

    Finds the rates of optax's optimizers (`sgd`, `adam`, `adamw`, `lamb`, ...), constant or scheduled, also after
    clipping in an `optax.chain`; rates held by `optax.inject_hyperparams`; and the rates of wrappers
    (`apply_if_finite`, `lookahead`, `masked`, `MultiSteps`, `partition`) with a single rate. Does not find rates of
    groups with several rates, or of transformations from outside optax.

    Example:
      >>> find_learning_rate(optax.chain(optax.clip(1.0), optax.adam(0.25))).value
      0.25
    """
    found = _find(transformation)
    # Setting one of several injected rates would set all of them.
    several = found is not None and found.injected not in (0, sum(map(_holds_injected_rate, _nested(transformation))))
    return None if several else found


def _find(transformation: optax.GradientTransformation) -> FoundRate | None:
    scales: list[Any] = []
    scales_multiply = True
    for stage in reversed(list(_stages(transformation))):
        if stage.maker in NORMALIZING:
            break
        if stage.maker in LINEAR or _is_masked(stage, LINEAR):
            continue
        if stage.maker in OTHER or _is_masked(stage, LINEAR | NORMALIZING | OTHER):
            scales_multiply = False
        elif stage.maker in ("scale", "scale_by_schedule") and scales_multiply:
            scales.append(stage.closure.get("step_size", stage.closure.get("step_size_fn")))
        elif scales or not scales_multiply:
            return None
        else:
            return _injected_rate(stage) if _holds_injected_rate(stage) else _wrapped_rate(stage)
    return _product(scales)


def _wrapped_rate(stage: _Stage) -> FoundRate | None:
    """Returns the rate shared by all inner transformations of a wrapper; None for other stages."""
    wrapped = stage.closure.get(WRAPPERS.get(stage.maker, ""))
    if wrapped is None:
        return None
    parts = list(wrapped.values()) if isinstance(wrapped, dict) else [wrapped]
    rates = [_find(part) for part in parts if any(each.maker != "set_to_zero" for each in _stages(part))]
    first = rates[0] if rates else None
    if first is None or any(rate is None or configuration_key(tuple(rate)) != configuration_key(tuple(first))
                            for rate in rates):
        return None
    scales_updates = first.scales_updates and stage.maker not in PARTLY_SCALED
    return FoundRate(first.value, first.injected * len(rates), scales_updates)


def stage_names(transformation: optax.GradientTransformation) -> list[str]:
    """Returns the names of the functions that made the stages of a transformation, including inside wrappers.

    Hyperparameters, schedules and masks are omitted, except for hyperparameters that are optimizers.

    Example:
      >>> stage_names(optax.chain(optax.clip(1.0), optax.apply_if_finite(optax.adamw(0.25), 3)))
      ['clip', 'apply_if_finite', 'scale_by_adam', 'add_decayed_weights', 'scale']
      >>> stage_names(optax.nadam(0.25))
      ['scale_by_adam (nesterov)', 'scale']
    """
    names = []
    for stage in _nested(transformation):
        made_by = [stage.maker]
        if stage.maker == "inject_hyperparams":
            factory = stage.closure["inner_factory"]
            made_by.append(_made_by(factory.func if isinstance(factory, functools.partial) else factory))
        if (stage.closure | stage.closure.get("other_hps", {})).get("nesterov") is True:
            made_by[-1] += " (nesterov)"
        names += made_by
    return names


def adds_gradients(transformation: optax.GradientTransformation) -> bool:
    """Returns whether a transformation certainly lacks a learning rate, which also makes its updates a descent.

    >>> adds_gradients(optax.chain(optax.clip(1.0), optax.scale_by_adam())), adds_gradients(optax.adam(0.25))
    (True, False)
    """
    makers = {stage.maker for stage in _stages(transformation)}
    return "set_to_zero" not in makers and makers <= LINEAR | NORMALIZING | OTHER


def _nested(transformation: optax.GradientTransformation) -> Iterator[_Stage]:
    """Yields the stages of nested chains in order, each stage before its inner stages."""
    for stage in _stages(transformation):
        yield stage
        for value in stage.closure.values():
            for part in value.values() if isinstance(value, dict) else [value]:
                if isinstance(part, optax.GradientTransformation):
                    yield from _nested(part)


def _stages(transformation: optax.GradientTransformation) -> Iterator[_Stage]:
    """Yields the stages of nested chains in order."""
    maker = _made_by(transformation.update)
    init, update = map(_closure_of, transformation)
    if maker == "chain" and "init_fns" in init and "update_fns" in update:
        for functions in zip(init["init_fns"], update["update_fns"], strict=True):
            yield from _stages(optax.GradientTransformation(*functions))
    elif maker == "with_extra_args_support" and "tx" in update:
        yield from _stages(update["tx"])
    else:
        yield _Stage(maker, init | update)


def _made_by(function: Callable[..., Any]) -> str:
    """Returns the name of the function or class that defines `function`, marked if it is not part of optax."""
    name = getattr(function, "__qualname__", type(function).__qualname__).partition(".")[0]
    module = getattr(function, "__module__", None) or ""
    # Omits the module of user code, because a script may run as a module or as `__main__`.
    return name if module.partition(".")[0] == "optax" else f"the user's {name}"


def _closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    if inspect.ismethod(function):
        return dict(getattr(function.__self__, "__dict__", {}))
    if not inspect.isfunction(function):
        return {}
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            closure[name] = cell.cell_contents
    return closure


def _is_masked(stage: _Stage, makers: frozenset[str]) -> bool:
    inner = stage.closure.get("inner")
    return stage.maker == "masked" and inner is not None and all(part.maker in makers for part in _stages(inner))


def _holds_injected_rate(stage: _Stage) -> bool:
    return stage.maker == "inject_hyperparams" and any(
        "learning_rate" in stage.closure.get(group, {}) for group in ("numeric_hps", "sched_hps"))


def _injected_rate(stage: _Stage) -> FoundRate | None:
    if "learning_rate" in stage.closure["numeric_hps"]:
        return FoundRate(float(stage.closure["numeric_hps"]["learning_rate"]), injected=1)
    # A plain schedule behaves as without the injection; a stateful schedule is not a function of the count.
    schedule = getattr(stage.closure["sched_hps"]["learning_rate"], "schedule_fn", None)
    return None if schedule is None else FoundRate(schedule)


def _product(scales: list[Any]) -> FoundRate | None:
    """Returns the absolute value of the product of all `scales`, numbers or schedules, without the sign of descent."""
    schedules = tuple(scale for scale in scales if callable(scale))
    numbers = [scale for scale in scales if not callable(scale)]
    if not scales or any(number is None or np.shape(number) != () for number in numbers):
        return None
    constant = abs(math.prod(map(float, numbers)))
    if schedules or constant == 0:  # A rate of 0 cannot be scaled to another rate, as with a schedule at 0.
        return FoundRate(lambda count: constant * math.prod(abs(schedule(count)) for schedule in schedules))
    return FoundRate(constant)
