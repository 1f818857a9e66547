"""Callbacks from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.callbacks.base.callback import Callback
from trainer.core.arguments import require_functions


class LambdaCallback(Callback):
    """A callback whose hooks are the given functions.

    Args:
      on_epoch_begin: called with `(epoch, logs)`.
      on_epoch_end: called with `(epoch, logs)`.
      on_train_begin: called with `(logs)`.
      on_train_end: called with `(logs)`.
      on_train_batch_begin: called with `(batch, logs=logs)`.
      on_train_batch_end: called with `(batch, logs=logs)`.
      **kwargs: other hooks of `Callback`, by name; names that do not begin with "on_" become attributes.

    Raises:
      TypeError: if a keyword begins with "on_" but is not a hook, or a hook is not callable.

    Example:

    >>> printer = LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
    >>> printer.on_epoch_end(0, {"loss": 0.5})
    0 0.5
    """

    def __init__(
        self,
        on_epoch_begin: Callable | None = None,
        on_epoch_end: Callable | None = None,
        on_train_begin: Callable | None = None,
        on_train_end: Callable | None = None,
        on_train_batch_begin: Callable | None = None,
        on_train_batch_end: Callable | None = None,
        **kwargs: Any,
    ):
        hooks = {"on_epoch_begin": on_epoch_begin, "on_epoch_end": on_epoch_end, "on_train_begin": on_train_begin,
                 "on_train_end": on_train_end, "on_train_batch_begin": on_train_batch_begin,
                 "on_train_batch_end": on_train_batch_end}
        for name, value in {**hooks, **kwargs}.items():
            if name.startswith("on_") and not hasattr(Callback, name):
                known = ", ".join(hook for hook in dir(Callback) if hook.startswith("on_"))
                raise TypeError(f"`LambdaCallback` has no hook {name!r}. Known hooks: {known}.")
            if name.startswith("on_"):
                require_functions(**{name: value})
            if value is not None:
                setattr(self, name, value)
