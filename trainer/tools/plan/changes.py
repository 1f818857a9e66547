"""Alternative ways to train, compared by a plan: each saves memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from trainer.data.sources.arrays import Batch
from trainer.distribute import FullyShardedStrategy, ModelParallelStrategy, Strategy
from trainer.distribute.placement.described import Topology
from trainer.distribute.placement.placement import REPLICA_AXIS, SHARD_AXIS
from trainer.distribute.strategies.fully_sharded import ShardedStrategy
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.core.state_holder import first_rows
from trainer.engine.model.model import Model
from trainer.tools.plan.planned_phase import copy_under

_MICROBATCHES = (2, 4, 8)


class Change(NamedTuple):
    """An alternative way to train.

    Attributes:
      text: the change, as a user would write it.
      options: arguments of `compile`.
      strategy: another strategy; None for the same.
      batch: another batch; None for the same.
    """

    text: str
    options: Mapping[str, Any] = {}
    strategy: Strategy | None = None
    batch: Any = None


def changes_to_try(model: Model, strategy: Strategy, batch: Batch, topology: Topology) -> Iterator[Change]:
    """Yields changes that save memory, and that the model and the batch allow."""
    options, replicas = core_of(model).configuration.options, strategy.num_replicas_in_sync
    rows = jax.tree.leaves(batch)[0].shape[0]
    if not core_of(model).overrides("train_step"):
        for factor in _MICROBATCHES:
            parts = factor * options.microbatches
            if rows % (parts * replicas) == 0:
                yield Change(f"microbatches={parts}", {"microbatches": parts})
    cheap: dict[str, Any] = {}
    if not options.remat:
        cheap["remat"] = True
        yield Change("remat=True", {"remat": True})
    if options.policy is None:
        cheap["precision"] = "mixed_bfloat16"
        yield Change('precision="mixed_bfloat16"', {"precision": "mixed_bfloat16"})
    if len(cheap) > 1:
        yield Change('remat=True, precision="mixed_bfloat16"', cheap)
    for other, text in _other_strategies(model, strategy, batch, topology):
        yield Change(text, strategy=other)
        if cheap:
            written = ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in cheap.items())
            yield Change(f"{text}, {written}", cheap, other)
    if rows % (2 * replicas) == 0:
        half = jax.tree.map(lambda leaf: leaf[:rows // 2], batch)
        yield Change(f"batches of {rows // 2} rows", batch=half)


def _other_strategies(
    model: Model, strategy: Strategy, batch: Batch, topology: Topology
) -> Iterator[tuple[Strategy, str]]:
    devices = list(strategy.mesh.devices.flat)
    if len(devices) == 1 or isinstance(strategy, ShardedStrategy):
        return
    yield FullyShardedStrategy(devices), "FullyShardedStrategy()"
    if topology.hosts > 1:
        hybrid = {REPLICA_AXIS: topology.hosts, SHARD_AXIS: topology.gpus_per_host}
        yield FullyShardedStrategy(devices, mesh_shape=hybrid), f"FullyShardedStrategy(mesh_shape={hybrid})"
    layouts = core_of(copy_under(model, strategy, {})).state.shapes(model.sample_inputs(first_rows(batch))).layouts
    names = {name for _, layout in layouts for entry in layout for name in _axes(entry)} - {REPLICA_AXIS}
    if len(names) == 1 and topology.gpus_per_host > 1:
        axis, size = names.pop(), topology.gpus_per_host
        shape = {REPLICA_AXIS: len(devices) // size, axis: size}
        yield ModelParallelStrategy(shape, devices), f"ModelParallelStrategy({shape})"


def _axes(entry: Any) -> Sequence[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
