"""Sharding annotations of a module's parameters: Flax's boxes, and metadata of NNX variables.

Owns their axis names, after the logical axis rules in force are applied. The mesh, and so which of these axes exist, is
unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core.spmd import get_pspec
from flax.linen.spmd import logical_to_mesh_axes
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from trainer.core.tree_paths import path_name
from trainer.core.types import Layout, PyTree


def layouts_of_boxes(variables: PyTree) -> dict[str, Layout]:
    """Returns the layouts named by the boxes (`nn.Partitioned`) in a tree, by the paths of their arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(variables, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
    return _known((path_name(path), _spec_of_box(box)) for path, box in leaves if isinstance(box, nn.Partitioned))


def layouts_of_metadata(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, Layout]:
    """Returns the layouts named by the metadata of NNX variables, by the paths of the variables."""
    return _known((path, get_pspec(_spec(values["out_sharding"]), values.get("sharding_rules")))
                  for path, values in metadata.items() if values.get("out_sharding"))


def _spec_of_box(box: nn.Partitioned) -> PartitionSpec | None:
    if isinstance(box, nn.LogicallyPartitioned):
        return logical_to_mesh_axes(box.names, box.rules)
    return box.get_partition_spec()


def _spec(sharding: Any) -> PartitionSpec:
    if isinstance(sharding, Format):
        sharding = sharding.sharding
    return PartitionSpec(*(sharding.spec if isinstance(sharding, NamedSharding) else sharding))


def _known(specs: Iterable[tuple[str, PartitionSpec | None]]) -> dict[str, Layout]:
    layouts = {path: tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec or ())
               for path, spec in specs}
    return {path: layout for path, layout in layouts.items() if any(layout)}
