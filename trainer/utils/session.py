"""Settings of a script for all models, and programs left from earlier models."""

from __future__ import annotations

import gc

import jax

from trainer.core.ambient.interactive_logging import enable_interactive_logging
from trainer.core.arguments import require_bool
from trainer.core.rng import set_default_seed


def clear_session(free_memory: bool = True) -> None:
    """Resets `set_random_seed` and `disable_interactive_logging`, and frees memory.

    A model's arrays and programs are freed with the model, when nothing refers to it: drop it and its `History` first.
    Models in use keep both. Beyond that, JAX keeps the traces and programs of functions, also the script's own; they
    are dropped too, and made again when they are needed.

    Args:
      free_memory: whether to collect garbage and to drop JAX's traces and programs.

    Raises:
      TypeError: if `free_memory` is not True or False.

    Example:
      >>> from trainer import utils
      >>> utils.disable_interactive_logging()
      >>> clear_session()
      >>> utils.is_interactive_logging_enabled()
      True

    Source: `keras.utils.clear_session`.
    """
    require_bool(free_memory=free_memory)
    set_default_seed(0)
    enable_interactive_logging()
    if free_memory:
        gc.collect()
        jax.clear_caches()
        gc.collect()
