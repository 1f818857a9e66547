"""What every optimizer with a Keras name takes in addition to its own arguments.

That is clipping and weight decay; gradients that are averaged over several calls; and arguments that the trainer has
elsewhere, which are refused with the name that they have there.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import optax

from trainer.core import arguments
from trainer.core.errors import unknown_argument
from trainer.optimizers import transforms


class FurtherArguments(TypedDict, total=False):
    """Keras's arguments of every optimizer that are rarely given; see `FURTHER_DEFAULTS`."""

    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None


#: Their defaults, Keras's.
FURTHER_DEFAULTS: dict[str, Any] = {
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def with_common_arguments(
    *steps: optax.GradientTransformation,
    weight_decay: float | None,
    clipnorm: float | None,
    clipvalue: float | None,
    global_clipnorm: float | None,
    **further: Unpack[FurtherArguments],
) -> optax.GradientTransformation:
    """Returns the chain of `steps` on clipped gradients and decayed parameters, in Keras's order.

    Args:
      *steps: what turns gradients into updates; the extra argument `learning_rate` reaches them.
      weight_decay: how much of itself, times the learning rate, each parameter loses before an update.
      clipnorm: the largest L2 norm of one parameter's gradient.
      clipvalue: the largest absolute value in a gradient.
      global_clipnorm: the largest L2 norm of all gradients together.
      **further: see `FurtherArguments`.

    Raises:
      ValueError: if more than one of the three clips is given, or one is not above 0, or `weight_decay` is below 0; for
        an argument that the trainer has elsewhere.
      TypeError: for an unknown argument.
    """
    clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
    given = {name: value for name, value in clips.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. "
                         f"Received: {', '.join(f'{name}={value}' for name, value in given.items())}.")
    arguments.require_positive(**given)
    makers = {
        "clipnorm": transforms.clip_each_by_norm,
        "clipvalue": optax.clip,
        "global_clipnorm": optax.clip_by_global_norm,
    }
    clip = [makers[name](value) for name, value in given.items()]
    chain = optax.chain(transforms.cast_to_params(), *clip, *steps)
    if weight_decay is not None:
        arguments.require_non_negative(weight_decay=weight_decay)
        chain = transforms.after_weight_decay(chain, weight_decay)
    for name in sorted(further.keys() - FURTHER_DEFAULTS.keys()):  # which a subclass has passed on
        raise unknown_argument("The optimizer", name, FURTHER_DEFAULTS)
    _refuse_what_is_elsewhere(further)
    accumulated = further.get("gradient_accumulation_steps")
    if not accumulated:
        return chain
    arguments.check_count("gradient_accumulation_steps", accumulated, 2)
    return transforms.average_gradients(chain, accumulated)


def _refuse_what_is_elsewhere(further: FurtherArguments) -> None:
    use_ema = further.get("use_ema", False)
    arguments.require_bool(use_ema=use_ema)
    if use_ema:
        momentum = further.get("ema_momentum", FURTHER_DEFAULTS["ema_momentum"])
        raise ValueError(
            f"`use_ema=True` is an argument of `compile` here: `compile(..., ema_decay={momentum})` keeps the average "
            "of the weights, with which `evaluate` and `predict` compute. For what is stored, use "
            "`trainer.callbacks.SwapEMAWeights`.")
    scale = further.get("loss_scale_factor")
    if scale is not None:
        raise ValueError(
            f"Gradients are scaled by the model's precision: `compile(..., precision=\"mixed_float16\")`, whose scale "
            f"adapts, or no scale with \"mixed_bfloat16\". Received: loss_scale_factor={scale}. It changes no numbers "
            "in float32: leave it out.")
