"""JAX's thread-local configuration, as set by its context managers, such as `jax.default_matmul_precision`.

JAX keeps these options per thread and not in context variables, and offers no copy of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import jax

jax_config: Any = jax.config  # JAX declares its attributes at run time

_THREAD_GUARD = "jax_thread_guard"  # belongs to a single thread, so no other thread may have it

#: Options with a context manager in JAX. `jax_transfer_guard` sets several options, and sorts before them.
OPTIONS = tuple(sorted(option for option in jax_config.values if option != _THREAD_GUARD
                       and callable(getattr(jax, option.removeprefix("jax_"), None))))

_values_of = operator.attrgetter(*OPTIONS)


class JaxOptions:
    """The option values of the thread that creates this object.

    Args:
      leave_out: options that another thread or process must not have.

    >>> with jax.numpy_rank_promotion("raise"):
    ...     options = JaxOptions()
    >>> with options.entered():
    ...     jax.config.jax_numpy_rank_promotion
    'raise'
    """

    def __init__(self, leave_out: tuple[str, ...] = ()):
        self._values = {option: value for option, value in zip(OPTIONS, _values_of(jax_config), strict=True)
                        if option not in leave_out}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the block with these values. Options with equal values still follow later changes for all threads."""
        with contextlib.ExitStack() as stack:
            for option, value in self._values.items():
                if getattr(jax_config, option) != value:
                    stack.enter_context(getattr(jax, option.removeprefix("jax_"))(value))
            yield
