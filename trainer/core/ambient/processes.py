"""What other processes that run user code get of the context: they have other devices, and not all can be sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer.core.ambient.jax_options import OPTIONS, JaxOptions
from trainer.core.ambient.state import current, replaced

# The default device, and the guards over transfers.
_OF_DEVICES = tuple(option for option in OPTIONS if option.startswith(("jax_default_device", "jax_transfer_guard")))


class SentContext:
    """The context of the thread that makes this, to be sent to a process that works for it.

    JAX's configuration is sent, but for options about devices. A strategy stays with its devices: code that asks for
    the strategy in scope gets the process's own form of it, or an error where there is none. Custom objects and the
    user's context variables stay too, as they may hold anything.

    Args:
      strategy: stands in for the strategy in scope; must be such that the process can get it. None if nothing does.
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
