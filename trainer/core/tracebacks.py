"""Tracebacks and warnings that show the user's lines, without frames of the trainer, JAX and Flax.

Owns the choice of the frames, and the advice in out-of-memory errors. JAX's option controls the filter:
`JAX_TRACEBACK_FILTERING=off`, or `jax.config.update("jax_traceback_filtering", "off")`, shows all frames.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

import jax

_config: Any = jax.config  # JAX declares its attributes at run time
_REMOVING = ("auto", "quiet_remove_frames")  # JAX's other modes keep all frames, here or in another error
_MEMORY_IS_OUT = ("RESOURCE_EXHAUSTED", "Out of memory")  # on accelerators; on CPU devices
_OUT_OF_MEMORY = (
    "What a step needs grows with `batch_size`. `compile(microbatches=...)` computes a batch in parts, with the same "
    "numbers; `compile(remat=True)` computes activations again instead of keeping them, and "
    "`compile(precision=\"mixed_bfloat16\")` halves them. `compile(data_on_device=False)` leaves the data on the host. "
    "`trainer.distribute.FullyShardedStrategy` splits weights and the optimizer's state over the devices. "
    "`strategy.explain(model, x)` prints what each device holds. JAX takes three quarters of a GPU's memory: with "
    "`XLA_CLIENT_MEM_FRACTION=0.9` in the environment, more.")


class shortened:
    """Removes frames outside of the user's code from the tracebacks of errors in the block, and of their causes.

    The trainer's frame that raised an error stays. Out-of-memory errors get advice.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        chain = list(_chain(error))
        if any(map(is_out_of_memory, chain)) and _OUT_OF_MEMORY not in getattr(error, "__notes__", ()):
            error.add_note(_OUT_OF_MEMORY)
        if _config.jax_traceback_filtering in _REMOVING:
            for each in chain:
                each.__traceback__ = _shown(each.__traceback__)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error reports that a device is out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and any(text in str(error) for text in _MEMORY_IS_OUT)


def user_stacklevel() -> int:
    """Returns the `stacklevel` with which the caller's `warnings.warn` names the user's line."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_hidden()):
        level, frame = level + 1, frame.f_back
    return level


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes and contexts, which Python prints above it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _shown(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without hidden frames; None if none remains."""
    frames = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        raised = traceback.tb_next is None and file.startswith(_ours())
        if raised or not file.startswith(_hidden()):
            frames.append(traceback)
        traceback = traceback.tb_next
    shown = None
    for each in reversed(frames):
        shown = types.TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _ours() -> str:
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@functools.cache
def _hidden() -> tuple[str, ...]:
    """Returns the path prefixes of files with hidden frames."""
    specs = (importlib.util.find_spec(name) for name in ("jax", "jaxlib", "flax"))
    folders = [folder for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return (_ours(), *(os.path.join(folder, "") for folder in folders), contextlib.__file__)
