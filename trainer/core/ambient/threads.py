"""Runs user code in other threads with the context of the thread that starts them.

Threads without user code, such as checkpoint writers, do not need this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from trainer.core.ambient.jax_options import JaxOptions
from trainer.core.ambient.state import surroundings

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def in_caller_context(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Returns a function for other threads that runs `function` in the context of the current thread.

    The context has the strategy in scope, the custom objects, the user's context variables, and JAX's thread-local
    configuration, with their current values. It has no trace. Each call uses a copy, so several threads may call the
    function at the same time.

    Args:
      function: the function to run in a thread.

    Example:
      >>> import threading
      >>> import jax
      >>> with jax.default_matmul_precision("float32"):
      ...     thread = threading.Thread(target=in_caller_context(
      ...         lambda: print(jax.config.jax_default_matmul_precision)))
      >>> thread.start(); thread.join()
      float32
    """
    context, options = surroundings(), JaxOptions()

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        with options.entered():
            return function(*args, **kwargs)

    def call_in_context(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        return context.copy().run(call, *args, **kwargs)

    return call_in_context
