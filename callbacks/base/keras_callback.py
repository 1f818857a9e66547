"""Support for Keras's callbacks: instances of `keras.callbacks.Callback` and of its subclasses.

Owns their calls, and the state that a run saves for them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.callbacks.base.callback import Callback, copied_containers
from trainer.callbacks.base.run_protocol import Run
from trainer.core.types import keras_class

_PLAIN = (bool, int, float, str, bytes, np.ndarray, np.number)


def as_callback(value: object) -> Any:
    """Returns a `Callback` for an instance of Keras's `Callback`; returns anything else unchanged."""
    base = keras_class(value, "Callback")
    return value if base is None or isinstance(value, (Callback, type)) else KerasCallback(value, base)


class KerasCallback(Callback):
    """Adapter for a callback that was written for Keras.

    Calls the hooks that the callback overrides, with the same arguments as Keras. The callback's `model` is the
    trainer's model. A saved run includes the callback's attributes that are None, numbers, text or arrays, or lists,
    tuples and dicts of them. Other attributes keep the values that the script sets.

    Args:
      callback: Keras callback.
      base: Keras's `Callback`, whose own hooks are not called.
    """

    def __init__(self, callback: Any, base: type):
        self.callback = callback
        for hook in (name for name in dir(base) if name.startswith("on_")):
            if getattr(type(callback), hook) is not getattr(base, hook) or hook in vars(callback):
                setattr(self, hook, functools.partial(self._call, hook))

    def _call(self, hook: str, *arguments: Any, **named: Any) -> None:
        getattr(self.callback, hook)(*arguments, **named)

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        self.callback.set_params(dict(params))

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        self.callback.set_model(model)

    def state_dict(self) -> dict[str, Any]:
        return {name: copied_containers(value) for name, value in vars(self.callback).items()
                if name not in ("params", "_model") and _is_plain(value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "monitor_op" not in state and getattr(self.callback, "monitor_op", self) is None:
            # At the first log, Keras determines the better direction and changes the sign of `min_delta`.
            self.callback._set_monitor_op()
        vars(self.callback).update(state)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _PLAIN)
