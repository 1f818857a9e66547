"""Checks of model attributes, before any computation."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from flax import linen as nn

from trainer.models.layers.dot_product_attention import AttentionImplementation
from trainer.models.layers.head import ACTIVATIONS


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_token(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number_of_layers(value: Any) -> bool:
    return _is_token(value) and int(value) >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _is_rate(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value <= float(np.finfo(np.float32).max)


def _is_flag(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_activation(value: object) -> bool:
    return value is None or callable(value) or (isinstance(value, str) and value in ACTIVATIONS)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _or_none(rule: tuple[Callable[[Any], bool], str]) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value is None or rule[0](value)), f"{rule[1]}, or None"


def _is_attention(value: object) -> bool:
    return isinstance(value, str) and value in get_args(AttentionImplementation)


def _are_counts(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_count, value))


_COUNTS = (_are_counts, "a tuple of whole numbers of at least 1")
_COUNT, _RATE = (_is_count, "a whole number of at least 1"), (_is_rate, "a number of at least 0 and below 1")
_POSITIVE, _FLAG = (_is_positive, "a number above 0"), (_is_flag, "True or False")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_classes": _COUNT, "dropout_rate": _RATE, "drop_connect_rate": _RATE, "drop_path_rate": _RATE,
    "alpha": _POSITIVE, "width_coefficient": _POSITIVE, "depth_coefficient": _POSITIVE,
    "num_layers": (_is_number_of_layers, "a whole number of at least 0"),
    **dict.fromkeys(("vocab_size", "d_model", "num_heads", "max_len", "num_types", "width", "depth",
                     "mlp_width", "patch_size", "smallest_side", "hidden", "depths", "widths", "convolutions"),
                    _COUNT),
    "mlp_dim": _COUNT, "logits_chunk_size": _or_none(_COUNT), "num_kv_heads": _or_none(_COUNT), "rope_theta": _POSITIVE,
    "tied_embedding": _FLAG, "mask_token": _or_none((_is_token, "a whole number")),
    "layer_prefix": (lambda value: isinstance(value, str), "text"),
    "attention": (_is_attention, f"one of {', '.join(map(repr, get_args(AttentionImplementation)))}"),
    "activation": (callable, "a function"),
    "norm_momentum": (_is_share, "a number in [0, 1]"), "norm_epsilon": _POSITIVE,
    "layer_norm_epsilon": _POSITIVE,
    "layer_scale_init_value": _or_none(_POSITIVE), "bottleneck": _FLAG, "divides_by_sqrt_stddev": _FLAG,
    "include_top": _FLAG, "include_preprocessing": _FLAG, "minimalistic": _FLAG,
    "classifier_activation": (_is_activation, f"{', '.join(map(repr, ACTIVATIONS))}, a function or None"),
}


def check(module: nn.Module) -> None:
    """Raises ValueError for an invalid number of classes, size, rate, multiplier, flag or activation of a model.

    >>> class Net(nn.Module):
    ...     num_classes: int = 0
    >>> check(Net())
    Traceback (most recent call last):
    ValueError: `num_classes` of Net must be a whole number of at least 1. Received: 0.
    """
    for name, (holds, expected) in _RULES.items():
        if name not in module.__dataclass_fields__:
            continue
        value = getattr(module, name)
        if isinstance(module.__dataclass_fields__[name].default, tuple):
            holds, expected = _COUNTS
        if not holds(value) and not (value is None and module.__dataclass_fields__[name].default is None):
            raise ValueError(f"`{name}` of {type(module).__name__} must be {expected}. Received: {value!r}.")
