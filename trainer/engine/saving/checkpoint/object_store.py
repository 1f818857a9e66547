"""A checkpoint in an object store, where nothing is renamed: its manifest, written last, says where the files are.

A checkpoint is an object `manifest.json` beside a folder `data.<hex>` of files. A save writes a new folder, then
replaces the manifest, in one request, then removes the former folder. So a save that is killed leaves the former
checkpoint whole, and a folder that no manifest names, which the next save removes. Owns these names and this order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from trainer.core.files import replace_file, storage
from trainer.engine.saving.checkpoint import manifest
from trainer.engine.saving.checkpoint.manifest import CheckpointError

_DAMAGED = "damaged_manifest.json"  # the name of the manifest of a damaged checkpoint, which is not used again


def begin(path: str, replace: bool) -> str:
    """Returns the folder for the files of a new checkpoint, and removes leftovers of killed saves.

    Raises:
      FileExistsError: if there is a checkpoint and `replace` is false, or anything else.
    """
    names = set(storage.names(path))
    others = {name for name in names - {manifest.FILE_NAME, _DAMAGED} if not manifest.DATA_FOLDER.fullmatch(name)}
    if others or (not names and storage.is_file(path)):
        raise FileExistsError(f"{path!r} is not a checkpoint, so it is not replaced. Save elsewhere.")
    if manifest.FILE_NAME in names and not replace:
        raise FileExistsError(f"There is something at {path!r} already. Save elsewhere, or pass `replace=True`.")
    remove_leftovers(path)
    return os.path.join(path, f"data.{secrets.token_hex(6)}")


def put_in_place(folder: str, path: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes the files in a folder of `begin` the checkpoint at `path`, and then removes the former files.

    Args:
      folder: folder of the files, all of which are written.
      path: path of the checkpoint.
      files: "size" and "sha256" of each file, by path below the folder.

    Raises:
      CheckpointError: if the store does not have the files, such as after another save to the same path.
    """
    found = storage.sizes(folder)
    lost = sorted(name for name, file in files.items() if found.get(name) != file["size"])
    if lost:
        raise CheckpointError(f"The store lacks files that were written to {folder!r}: {lost[0]!r} has "
                              f"{found.get(lost[0], 'no')} bytes instead of {files[lost[0]]['size']}. Does another "
                              "process save to the same path?")
    name = os.path.basename(folder)
    replace_file(os.path.join(path, manifest.FILE_NAME),
                 manifest.text_of({f"{name}/{file}": about for file, about in files.items()}, name))
    with contextlib.suppress(OSError):  # the checkpoint is saved, and the next save tries again
        _remove_others(path, name)


def remove_leftovers(path: str) -> None:
    """Removes the leftovers of killed saves to `path`: all files that no manifest there names.

    Raises:
      OSError: if they cannot be removed.
      CheckpointError: if the manifest is damaged, and does not say which files are its own.
    """
    storage.abort_uploads(path)
    names = storage.names(path)
    if manifest.FILE_NAME in names:
        _remove_others(path, os.path.basename(manifest.data_folder(path)))
    elif _DAMAGED not in names:
        _remove_others(path, "")


def remove(path: str) -> None:
    """Removes a checkpoint, its manifest first, so that a kill leaves no damaged checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        storage.remove(path)


def put_aside(path: str) -> None:
    """Renames the manifest of a damaged checkpoint, so that it is not used again. Its files stay."""
    content = storage.open_object(os.path.join(path, manifest.FILE_NAME)).read()
    replace_file(os.path.join(path, _DAMAGED), content)
    storage.remove(os.path.join(path, manifest.FILE_NAME))


def is_aside(path: str) -> bool:
    """Returns whether a damaged checkpoint was put aside there."""
    return storage.is_file(os.path.join(path, _DAMAGED))


def _remove_others(path: str, kept: str) -> None:
    for name in storage.folder_names(path):
        if name != kept and manifest.DATA_FOLDER.fullmatch(name):
            remove(os.path.join(path, name))
