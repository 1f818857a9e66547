"""What every optimizer with a Keras name takes in addition to its own arguments: clipping and weight decay."""

from __future__ import annotations

import optax

from trainer.core import arguments
from trainer.optimizers import transforms


def with_common_arguments(
    *steps: optax.GradientTransformation,
    weight_decay: float | None,
    clipnorm: float | None,
    clipvalue: float | None,
    global_clipnorm: float | None,
) -> optax.GradientTransformation:
    """Returns the chain of `steps` on clipped gradients and decayed parameters, in Keras's order.

    Args:
      *steps: what turns gradients into updates; the extra argument `learning_rate` reaches them.
      weight_decay: how much of itself, times the learning rate, each parameter loses before an update.
      clipnorm: the largest L2 norm of one parameter's gradient.
      clipvalue: the largest absolute value in a gradient.
      global_clipnorm: the largest L2 norm of all gradients together.

    Raises:
      ValueError: if more than one of the three clips is given, or one is not above 0, or `weight_decay` is below 0.
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
    if weight_decay is None:
        return chain
    arguments.require_non_negative(weight_decay=weight_decay)
    return transforms.after_weight_decay(chain, weight_decay)
