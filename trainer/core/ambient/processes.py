"""The context for other processes that run user code: they have other devices, and some values cannot be sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer.core.ambient.jax_options import OPTIONS, JaxOptions
from trainer.core.ambient.state import current, replaced

# The default device, and the transfer guards.
_OF_DEVICES = tuple(option for option in OPTIONS if option.startswith(("jax_default_device", "jax_transfer_guard")))


class SentContext:
    """The context of the thread that creates this object, for a process that works for it.

    JAX's configuration is sent, except for options about devices. A strategy stays with its devices: in the process,
    code that asks for the strategy in scope gets `strategy`, or an error if there is none. Custom objects and the
    user's context variables are not sent, because they may hold anything.

    Args:
      strategy: replaces the strategy in scope; the process must be able to receive it. None for no strategy.
    """

    def __init__(self, strategy: Any = None):
        around = current()
        self._strategy = strategy
        self._elsewhere = around.strategy_elsewhere
        if strategy is None and around.strategy is not None:
            self._elsewhere = repr(around.strategy)
        self._jax_options = JaxOptions(leave_out=_OF_DEVICES)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the block in this context."""
        with replaced(strategy=self._strategy, strategy_elsewhere=self._elsewhere), self._jax_options.entered():
            yield
