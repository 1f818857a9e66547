"""JAX's configuration of one thread, as its context managers set it: `jax.default_matmul_precision` and the like.

JAX keeps these options by thread and not in context variables, and has no copy of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import jax

_config: Any = jax.config  # whose attributes JAX declares at run time

_THREAD_GUARD = "jax_thread_guard"  # says which thread alone may do something: no other may have it

#: The options that JAX has a context manager for. `jax_transfer_guard`, which sets several, comes before these.
OPTIONS = tuple(sorted(option for option in _config.values if option != _THREAD_GUARD
                       and callable(getattr(jax, option.removeprefix("jax_"), None))))

_values_of = operator.attrgetter(*OPTIONS)


class JaxOptions:
    """The values that options have in the thread that makes this.

    Args:
      leave_out: options that another thread or process shall not have.

    >>> with jax.numpy_rank_promotion("raise"):
    ...     options = JaxOptions()
    >>> with options.entered():
    ...     jax.config.jax_numpy_rank_promotion
    'raise'
    """

    def __init__(self, leave_out: tuple[str, ...] = ()):
        self._values = {option: value for option, value in zip(OPTIONS, _values_of(_config), strict=True)
                        if option not in leave_out}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the block with these values. Options that have them already follow later changes for all threads."""
        with contextlib.ExitStack() as stack:
            for option, value in self._values.items():
                if getattr(_config, option) != value:
                    stack.enter_context(getattr(jax, option.removeprefix("jax_"))(value))
            yield
