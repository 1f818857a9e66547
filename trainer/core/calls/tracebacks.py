"""Tracebacks and warnings that show the user's lines, without frames of the trainer, JAX and Flax.

Owns the choice of the frames, and the advice in out-of-memory errors. JAX's option controls the filter:
`JAX_TRACEBACK_FILTERING=off`, or `jax.config.update("jax_traceback_filtering", "off")`, shows all frames.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import os
import types
from collections.abc import Iterator

import jax

from trainer.core.ambient.jax_options import jax_config

_REMOVING = ("auto", "quiet_remove_frames")  # JAX's other modes keep all frames, here or in another error
_MEMORY_IS_OUT = ("RESOURCE_EXHAUSTED", "Out of memory")  # on accelerators; on CPU devices
_OUT_OF_MEMORY = (
    "What a step needs grows with `batch_size`. `compile(microbatches=...)` computes a batch in parts, with the same "
    "numbers; `compile(remat=True)` computes activations again instead of keeping them, and "
    "`compile(precision=\"mixed_bfloat16\")` halves them. `compile(data_on_device=False)` leaves the data on the host. "
    "`trainer.distribute.FullyShardedStrategy` splits weights and the optimizer's state over the devices. "
    "`strategy.explain(model, x)` prints what each device holds. JAX takes three quarters of a GPU's memory: with "
    "`XLA_CLIENT_MEM_FRACTION=0.9` in the environment, more.")


def shorten(error: Exception) -> None:
    """Removes frames outside of the user's code from the tracebacks of an error and of its causes.

    The trainer's frame that raised an error stays. Out-of-memory errors get advice.
    """
    chain = list(_chain(error))
    if any(map(is_out_of_memory, chain)) and _OUT_OF_MEMORY not in getattr(error, "__notes__", ()):
        error.add_note(_OUT_OF_MEMORY)
    if jax_config.jax_traceback_filtering in _REMOVING:
        for each in chain:
            each.__traceback__ = _shown(each.__traceback__)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error reports that a device is out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and any(text in str(error) for text in _MEMORY_IS_OUT)


def says_all(error: BaseException) -> bool:
    """Returns whether the message of an error says all: the trainer raised it on purpose, and in no call of the user's.

    False with `JAX_TRACEBACK_FILTERING=off`, for an error that a `raise` statement of the trainer did not raise (such
    as a fault in its code), and if the error or one of its causes came through code of the user or of another library.
    """
    if jax_config.jax_traceback_filtering not in _REMOVING or isinstance(error, AssertionError):
        return False
    # jsonargparse calls the classes that a configuration names; the others start a module, or import it.
    between = (*_hidden(), *_folders("jsonargparse"), importlib.__file__, "<frozen ")
    own = _entries(error.__traceback__)
    return bool(own) and _is_raised_by_trainer(own[-1]) and all(
        _file(entry).startswith(between) for each in _chain(error) for entry in _entries(each.__traceback__))


def _is_raised_by_trainer(last: types.TracebackType) -> bool:
    code = last.tb_frame.f_code
    return code.co_filename.startswith(_ours()) and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


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
    frames = [each for each in _entries(traceback) if not _file(each).startswith(_hidden())
              or (each.tb_next is None and _file(each).startswith(_ours()))]
    shown = None
    for each in reversed(frames):
        shown = types.TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _entries(traceback: types.TracebackType | None) -> list[types.TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _file(entry: types.TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _ours() -> str:
    return os.path.join(os.path.abspath(__file__).removesuffix(os.path.join("core", "calls", "tracebacks.py")), "")


@functools.cache
def _hidden() -> tuple[str, ...]:
    """Returns the path prefixes of files with hidden frames."""
    return (_ours(), *_folders("jax", "jaxlib", "flax"), contextlib.__file__)


def _folders(*names: str) -> list[str]:
    """Returns the path prefixes of files of packages, of those that are installed."""
    specs = (importlib.util.find_spec(name) for name in names)
    return [os.path.join(folder, "") for spec in specs if spec for folder in spec.submodule_search_locations or ()]
