"""Strategies: which devices train together, where the state lives, and how values are reduced."""

from trainer.distribute.distributed_dataset import DistributedDataset, InputContext
from trainer.distribute.mirrored import MirroredStrategy, OneDeviceStrategy
from trainer.distribute.per_replica import PerReplica
from trainer.distribute.strategy import Strategy, ValueContext, get_strategy, has_strategy, in_cross_replica_context
from trainer.replica import ReduceOp, ReplicaContext, get_replica_context

__all__ = [
    "DistributedDataset",
    "InputContext",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "ValueContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
