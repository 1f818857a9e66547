"""Strategies: which devices train together, where the state lives, and how values are reduced."""

from trainer.distribute.mirrored import MirroredStrategy, OneDeviceStrategy
from trainer.distribute.strategy import Strategy, get_strategy, has_strategy
from trainer.replica import ReduceOp, ReplicaContext, get_replica_context

__all__ = [
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
]
