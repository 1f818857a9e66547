"""Arrays by path in Orbax's files, as other JAX programs write and read them.

Owns the conversion between names, such as "params/Dense_0/kernel", and Orbax's trees, and the place of a tree in a
folder of Orbax. Reads OCDBT and Zarr, versions 2 and 3, as Orbax does. Writing uses only Orbax's handler: the folder
appears in one step by `disk`, and its manifest has checksums, which Orbax's files lack.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from trainer.core import tree_paths
from trainer.core.errors import brief
from trainer.engine.saving.checkpoint import layout

_TREE = "_METADATA"  # the file that a folder with a tree has
_STEP = re.compile(r"(?:.*_)?(\d+)")
_UNFINISHED = ".orbax-checkpoint-tmp"


def check_installed() -> None:
    """Raises ImportError unless Orbax is installed."""
    _orbax()


def write(folder: str, arrays: Mapping[str, jax.Array]) -> None:
    """Writes the shards of arrays that this process is the first to hold. `finish` ends the write of all processes.

    Args:
      folder: existing folder of a step, in which the tree gets Orbax's name for a single tree, "default".
      arrays: arrays by path. Orbax has no arrays without values: they are left out.

    Raises:
      OSError: if a file cannot be written.
    """
    ocp, epath = _orbax()
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.size:
            *parents, last = name.split(tree_paths.SEPARATOR)
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = array
    with contextlib.closing(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as handler:
        handler.save(epath.Path(folder) / layout.ORBAX, args=ocp.args.PyTreeSave(tree))


def finish(folder: str) -> None:
    """Makes the shards of all processes a tree that Orbax reads. The first process calls it."""
    ocp, epath = _orbax()
    with contextlib.closing(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as handler:
        handler.finalize(epath.Path(folder) / layout.ORBAX)
    reader = ocp.StandardCheckpointHandler  # for a program that names none
    with open(os.path.join(folder, "_CHECKPOINT_METADATA"), "w", encoding="utf-8") as file:
        json.dump({"item_handlers": {layout.ORBAX: f"{reader.__module__}.{reader.__qualname__}"}, "metrics": {},
                   "performance_metrics": {}, "init_timestamp_nsecs": time.time_ns(),
                   "commit_timestamp_nsecs": time.time_ns(), "custom_metadata": {}}, file)


def find(path: str) -> str | None:
    """Returns the folder of Orbax's tree for a path: of a tree, of a step, or of steps, of which it takes the last.

    Raises:
      ValueError: if a step has several trees.
    """
    if os.path.isfile(os.path.join(path, _TREE)):
        return path
    names = [name for name in (os.listdir(path) if os.path.isdir(path) else ()) if _UNFINISHED not in name]
    trees = sorted(name for name in names if os.path.isfile(os.path.join(path, name, _TREE)))
    steps = {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}
    if trees and not set(trees) <= set(steps.values()):
        if len(trees) > 1:
            raise ValueError(f"{path!r} has several trees of Orbax: {', '.join(map(brief, trees))}. Give the path of "
                             f"one, such as {os.path.join(path, trees[0])!r}.")
        return os.path.join(path, trees[0])
    for step in sorted(steps, reverse=True):
        inside = os.path.join(path, steps[step])
        if not os.path.islink(inside) and (found := find(inside) if os.path.isdir(inside) else None):
            return found
    return None


class OrbaxTree:
    """The arrays of a tree by path; they are read by `read`, in parallel and without checksums.

    Args:
      path: folder of the tree, from `find`.

    Raises:
      ImportError: if Orbax is not installed.
      ValueError: if Orbax cannot read the description of the tree.

    Attributes:
      specs: shape and dtype of each array by path.
    """

    def __init__(self, path: str):
        self._ocp, self._epath = _orbax()
        self._path = path
        try:
            with contextlib.closing(self._ocp.PyTreeCheckpointHandler()) as handler:
                self._tree = handler.metadata(self._epath.Path(os.path.abspath(path))).tree
        except Exception as error:
            raise ValueError(
                f"{path!r} is no tree that Orbax can read: {type(error).__name__}: {brief(error)}") from error
        found = {name: leaf for name, leaf in tree_paths.named_leaves(self._tree).items()
                 if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and leaf.dtype is not None}
        self.specs: dict[str, layout.Spec] = {
            name: (tuple(leaf.shape or ()), np.dtype(leaf.dtype)) for name, leaf in found.items()}

    def read(self, shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, jax.Array]:
        """Returns arrays with their dtypes and new shardings. Each process reads the data of its own devices.

        Args:
          shardings: sharding of each wanted array, by path.

        Raises:
          ValueError: if a file is missing or damaged.
        """
        ocp = self._ocp

        def struct(key_path: Any, _: object) -> Any:
            name = tree_paths.path_name(key_path)
            if name not in shardings:
                return ocp.PLACEHOLDER
            shape, dtype = self.specs[name]
            return jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[name])

        item = jax.tree_util.tree_map_with_path(struct, self._tree)
        arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs() if leaf is ocp.PLACEHOLDER else ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True), item)
        try:
            with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
                restored = handler.restore(self._epath.Path(os.path.abspath(self._path)), args=ocp.args.PyTreeRestore(
                    item=item, restore_args=arguments))
        except Exception as error:
            raise ValueError(f"Orbax cannot read {self._path!r}: {type(error).__name__}: {brief(error)}") from error
        read = tree_paths.named_leaves(restored)
        return {name: jax.block_until_ready(read[name]) for name in shardings}


def _orbax() -> tuple[Any, Any]:
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        raise ImportError("Checkpoints of Orbax are written and read with the package orbax-checkpoint, which is not "
                          f"installed ({error}): `pip install 'trainer-jax[orbax]'`.") from error
    return ocp, epath
