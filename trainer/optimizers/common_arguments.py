"""The arguments that every optimizer with a Keras name takes after its own arguments.

These are weight decay, clipping, gradient accumulation, and arguments that belong elsewhere in the trainer. The latter
raise errors that name their place.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, cast

import optax

from trainer.core import arguments
from trainer.core.errors import unknown_argument
from trainer.optimizers import transforms

Init = TypeVar("Init", bound=Callable[..., None])


class FurtherArguments(TypedDict, total=False):
    """`CommonArguments` without `weight_decay`, for optimizers that define it themselves."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    name: str | None


class CommonArguments(FurtherArguments, total=False):
    """The arguments that every optimizer with a Keras name takes after its own arguments, by name or in this order.

    At most one clip can be set.

    Attributes:
      weight_decay: share of each parameter, times the learning rate, that is subtracted before an update; None for no
        weight decay.
      clipnorm: maximum L2 norm of each parameter's gradient; larger gradients are scaled down.
      clipvalue: maximum absolute value of gradient entries; larger values are clipped.
      global_clipnorm: maximum L2 norm of all gradients together; larger gradients are scaled down together.
      use_ema: must be false; `compile(ema_decay=...)` keeps a moving average of the weights.
      ema_momentum: ignored without `use_ema`.
      ema_overwrite_frequency: ignored without `use_ema`.
      loss_scale_factor: must be None; `compile(precision=...)` scales gradients.
      gradient_accumulation_steps: number of calls over which gradients are averaged; the last call makes the update.
      name: name of the optimizer; by default, its class's name in lower case.
    """

    weight_decay: float | None


# Keras's defaults, in its order.
_DEFAULTS: dict[str, Any] = {
    "weight_decay": None, "clipnorm": None, "clipvalue": None, "global_clipnorm": None, "use_ema": False,
    "ema_momentum": 0.99, "ema_overwrite_frequency": None, "loss_scale_factor": None,
    "gradient_accumulation_steps": None, "name": None,
}


def takes_common_arguments(init: Init) -> Init:
    """Replaces `**common` in the signature of an optimizer's `__init__` by the common arguments, as in Keras.

    They follow the optimizer's own arguments, precede its keyword-only arguments, and can all be passed by position. A
    common argument that the optimizer defines itself, such as the weight decay of AdamW, keeps its position.
    """
    *own, _ = inspect.signature(init).parameters.values()
    names, kind = {parameter.name for parameter in own}, inspect.Parameter.POSITIONAL_OR_KEYWORD
    annotations = CommonArguments.__annotations__
    common = [inspect.Parameter(name, kind, default=default, annotation=annotations[name])
              for name, default in _DEFAULTS.items() if name not in names]
    signature = inspect.Signature([
        *(parameter for parameter in own if parameter.kind is kind), *common,
        *(parameter.replace(kind=kind) for parameter in own if parameter.kind is not kind)])

    checked_init = arguments.checked(init, signature)

    @functools.wraps(init)
    def taking_common_arguments(*given: Any, **options: Any) -> None:
        for name in sorted(options.keys() - signature.parameters.keys()):  # passed on by a subclass
            raise unknown_argument("The optimizer", name, _DEFAULTS)
        checked_init(**signature.bind(*given, **options).arguments)

    taking_common_arguments.__signature__ = signature  # type: ignore[attr-defined]
    return cast(Init, taking_common_arguments)


def with_common_arguments(
    *steps: optax.GradientTransformation, **common: Unpack[CommonArguments]
) -> optax.GradientTransformation:
    """Returns the chain of `steps` after clipping and weight decay, in Keras's order.

    Args:
      *steps: transformations from gradients to updates, which receive the extra argument `learning_rate`.
      **common: the optimizer's common arguments.

    Raises:
      ValueError: if more than one clip is given, a clip is not above 0, `weight_decay` is below 0, or an argument
        belongs elsewhere in the trainer.
    """
    makers = {
        "clipnorm": transforms.clip_each_by_norm,
        "clipvalue": optax.clip,
        "global_clipnorm": optax.clip_by_global_norm,
    }
    values: dict[str, Any] = {**common}
    given = {name: values[name] for name in makers if values.get(name) is not None}
    if len(given) > 1:
        raise ValueError(f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. "
                         f"Received: {', '.join(f'{name}={value}' for name, value in given.items())}.")
    arguments.require_positive(**given)
    clip = [makers[name](value) for name, value in given.items()]
    chain = optax.chain(transforms.cast_to_params(), *clip, *steps)
    weight_decay = common.get("weight_decay")
    if weight_decay is not None:
        arguments.require_non_negative(weight_decay=weight_decay)
        chain = transforms.after_weight_decay(chain, weight_decay)
    _refuse_what_is_elsewhere(common)
    accumulated = common.get("gradient_accumulation_steps")
    if not accumulated:
        return chain
    arguments.check_count("gradient_accumulation_steps", accumulated, 2)
    return transforms.average_gradients(chain, accumulated)


def _refuse_what_is_elsewhere(common: CommonArguments) -> None:
    use_ema = common.get("use_ema", False)
    arguments.require_bool(use_ema=use_ema)
    if use_ema:
        momentum = common.get("ema_momentum", _DEFAULTS["ema_momentum"])
        raise ValueError(
            f"`use_ema=True` is an argument of `compile` here: `compile(..., ema_decay={momentum})` keeps the average "
            "of the weights, with which `evaluate` and `predict` compute. For what is stored, use "
            "`trainer.callbacks.SwapEMAWeights`.")
    scale = common.get("loss_scale_factor")
    if scale is not None:
        raise ValueError(
            f"Gradients are scaled by the model's precision: `compile(..., precision=\"mixed_float16\")`, whose scale "
            f"adapts, or no scale with \"mixed_bfloat16\". Received: loss_scale_factor={scale}. It changes no numbers "
            "in float32: leave it out.")
