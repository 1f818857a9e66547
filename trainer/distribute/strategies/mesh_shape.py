"""Meshes with named axes, from the sizes of their axes and from devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.core import errors
from trainer.core.arguments import check_count
from trainer.distribute.placement.placement import REPLICA_AXIS, SHARD_AXIS


def checked_sizes(mesh_shape: object, example: str) -> dict[str, int]:
    """Returns the sizes of a mesh's axes, with "replica"; before all other axes if there is "shard".

    Devices are given host by host, and are placed with the last axis fastest. So "shard" and the axes of a layout lie
    inside of a host as far as they fit into it, and "replica" goes over hosts.

    Args:
      mesh_shape: the user's argument.
      example: an example of it, for an error message.

    Raises:
      TypeError: if `mesh_shape` is not a mapping from names to whole numbers.
      ValueError: if a size is less than 1.

    >>> checked_sizes({"shard": 4, "model": 2, "replica": 2}, "")
    {'replica': 2, 'shard': 4, 'model': 2}
    """
    if not isinstance(mesh_shape, Mapping):
        raise errors.wrong_type("mesh_shape", mesh_shape, f"a dict such as {example}")
    for name, size in mesh_shape.items():
        if not isinstance(name, str):
            raise errors.wrong_type("mesh_shape", name, "a dict whose keys are the names of axes")
        check_count(f"mesh_shape[{name!r}]", size)
    sizes = dict(mesh_shape)
    if REPLICA_AXIS not in sizes or SHARD_AXIS in sizes:
        sizes = {REPLICA_AXIS: sizes.pop(REPLICA_AXIS, 1), **sizes}
    return sizes


def mesh_of(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh of some devices; raises ValueError unless their number is the size of the mesh."""
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"`mesh_shape` {dict(sizes)} has {math.prod(sizes.values())} places, but there are "
                         f"{len(devices)} devices. Expected: one device for each place.")
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes))


def mesh_over(mesh: Mesh, devices: Sequence[jax.Device], strategy: str) -> Mesh:
    """Returns the mesh with the same axes over other devices. Their number changes only the size of "replica".

    Raises:
      ValueError: if the product of the other sizes does not divide the number of devices; it names the strategy.
    """
    others = math.prod(size for name, size in mesh.shape.items() if name != REPLICA_AXIS)
    if len(devices) % others:
        raise ValueError(f"{strategy} has {others} devices in each replica, which do not divide {len(devices)}. "
                         "Give another `mesh_shape`.")
    return mesh_of({**mesh.shape, REPLICA_AXIS: len(devices) // others}, devices)
