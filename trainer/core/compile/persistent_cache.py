"""The cache of compiled programs on disk, so that the next start of a script does not compile them again.

Owns the settings of JAX's persistent compilation cache.
"""

from __future__ import annotations

import os
import pathlib
from typing import cast

from jax.experimental.compilation_cache import compilation_cache

from trainer.core.ambient.jax_options import jax_config
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.files import storage

_STORES = ("gs://", "s3://")  # that JAX's cache opens, by etils


@explains_arguments
def enable_compilation_cache(folder: str | os.PathLike | None = None) -> pathlib.Path:
    """Keeps all programs compiled from now on in a folder, and loads them from there.

    The key of a program has its code, the devices and the versions of JAX and XLA, so a cache never returns an outdated
    program. Old entries are not deleted. Programs from the folder run unchecked: no other user may have write access.

    Args:
      folder: the folder, created if missing, with permissions for its owner only. By default "trainer-jax" in the
        user's cache folder. Or its URL in an object store, "gs://..." or "s3://...".

    Returns:
      The folder.

    Raises:
      OSError: the folder cannot be created or written to.
      TypeError: `folder` is not a path.
      ValueError: `folder` is empty, or a URL of anything else.
      ImportError: the packages of the store are not installed.

    Example:
      >>> trainer.enable_compilation_cache("/tmp/cache")  # doctest: +SKIP
      PosixPath('/tmp/cache')

    Source: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    if folder is not None:
        folder = storage.as_place("folder", folder, "a path, or None for the user's cache folder")
        if storage.is_remote(folder):
            return _enable(_in_store(folder))
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(folder) if folder is not None else pathlib.Path(caches) / "trainer-jax"
    path = path.expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        # JAX would only warn, at every compilation.
        raise PermissionError(f"`folder` must be writable. Received: {str(path)!r}.")
    return _enable(path)


def _in_store(folder: str) -> pathlib.Path:
    if not folder.startswith(_STORES):
        raise ValueError(f"`folder` must be a local path or a URL that JAX's cache can open: {' or '.join(_STORES)}. "
                         f"Received: {folder!r}.")
    try:
        from etils import epath
    except ImportError as error:
        raise ImportError(f"{folder!r} is in an object store, which JAX's cache opens with etils: `pip install "
                          "'trainer-jax[remote]'`.") from error
    return cast(pathlib.Path, epath.Path(folder))  # with the methods of a path of the disk


def _enable(path: pathlib.Path) -> pathlib.Path:
    if jax_config.jax_compilation_cache_dir != str(path):
        compilation_cache.reset_cache()  # else the first folder stays in use
    jax_config.update("jax_compilation_cache_dir", str(path))
    # By default JAX skips programs that compile in less than a second: most programs of a small model.
    jax_config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax_config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
