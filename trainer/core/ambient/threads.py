"""Threads that run user code: all of them run it as the thread that starts them would.

A thread without user code, such as one that writes a checkpoint, needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from trainer.core.ambient.jax_options import JaxOptions
from trainer.core.ambient.state import surroundings

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def in_caller_context(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Returns a function for other threads, which runs `function` in the context of the thread that calls this.

    That is the strategy in scope and the custom objects, the user's context variables, and JAX's thread-local
    configuration, all as they are now. What is being traced stays behind. Each call has a copy, so that several threads
    may call it at a time.

    Args:
      function: what a thread runs.

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
