"""Keeping compiled programs on disk, so that the next start of a script does not compile them again.

Owns the settings of JAX's persistent compilation cache. What is compiled is not its business.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from trainer.core import errors


def enable_compilation_cache(folder: str | os.PathLike | None = None) -> pathlib.Path:
    """Keeps every program that is compiled from now on in a folder, and takes it from there when it is there.

    Programs are found by their code, the devices and the versions of JAX and XLA, so a cache never gives an outdated
    one; old entries are not deleted. Programs from the folder run as they are: no other user may be able to write
    there.

    Args:
      folder: where; made if it does not exist, for its owner alone. By default "trainer-jax" in the user's folder of
        caches.

    Returns:
      The folder.

    Raises:
      OSError: if the folder cannot be made or written to.
      TypeError: if `folder` is not a path.
      ValueError: if `folder` is empty.

    Example:
      >>> trainer.enable_compilation_cache("/tmp/cache")  # doctest: +SKIP
      PosixPath('/tmp/cache')

    Source: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise errors.wrong_type("folder", folder, "a path, or None for the user's cache folder")
    if folder is not None and not os.fspath(folder):
        raise ValueError("`folder` is empty. Give a path, or None for the user's cache folder.")
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(folder) if folder is not None else pathlib.Path(caches) / "trainer-jax"
    path = path.expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        # JAX would only warn, at every compilation.
        raise PermissionError(f"`folder` must be writable. Received: {str(path)!r}.")
    config: Any = jax.config  # which declares its attributes at run time
    if config.jax_compilation_cache_dir != str(path):
        compilation_cache.reset_cache()  # else the folder that was used first stays in use
    jax.config.update("jax_compilation_cache_dir", str(path))
    # By default JAX leaves out what compiles in less than a second: most of a small model's programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
