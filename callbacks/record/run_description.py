"""Description of a run (see `RunDetails.description`) as parameters for loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SECTIONS = ("compile", "fit")


def params_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns texts, numbers, bools and None by flat names.

    >>> params_of({"seed": 0, "compile": {"optimizer": "SGD()", "loss": {"a": "mse"}}, "fit": {"epochs": 3}})
    {'optimizer': 'SGD()', 'loss.a': 'mse', 'epochs': 3, 'seed': 0}
    """
    params: dict[str, Any] = {}
    for section in _SECTIONS:
        params.update(_flat(description.get(section, {})))
    for name in ("seed", "strategy", "replicas"):
        if name in description:
            params[name] = description[name]
    return params


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = ", ".join(map(str, value))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
