"""Strategies: the devices that train together, the placement of the state, and the reduction of values."""

import importlib
from typing import TYPE_CHECKING, Any

from trainer.cluster import ClusterError, ClusterTimeout, TFConfigClusterResolver
from trainer.core.replica_context import ReduceOp, ReplicaContext, get_replica_context
from trainer.data import AutoShardPolicy
from trainer.distribute import experimental
from trainer.distribute.placement.described import described_devices
from trainer.distribute.replica.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from trainer.distribute.replica.communication_options import CommunicationImplementation, CommunicationOptions
from trainer.distribute.replica.distributed_dataset import DistributedDataset, InputContext
from trainer.distribute.replica.on_each_replica import on_each_replica
from trainer.distribute.replica.per_replica import PerReplica
from trainer.distribute.strategies.custom_loops import ValueContext
from trainer.distribute.strategies.fully_sharded import CentralStorageStrategy, FullyShardedStrategy
from trainer.distribute.strategies.layout_map import LayoutMap
from trainer.distribute.strategies.mirrored import MirroredStrategy, OneDeviceStrategy
from trainer.distribute.strategies.model_parallel import ModelParallelStrategy
from trainer.distribute.strategies.multi_worker import MultiWorkerMirroredStrategy
from trainer.distribute.strategies.strategy import (
    Strategy,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from trainer.distribute.strategies.tpu import TPUStrategy

if TYPE_CHECKING:
    from trainer.distribute.parameter_server.coordinator import ClusterCoordinator, RemoteValue
    from trainer.distribute.parameter_server.embedding_table import EmbeddingTable
    from trainer.distribute.parameter_server.processes.failures import ParameterServerLostError, WorkerLostError
    from trainer.distribute.parameter_server.strategy import ParameterServerStrategy
    from trainer.model.sidecar_evaluator import SidecarEvaluator

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "ClusterError",
    "ClusterTimeout",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedDataset",
    "EmbeddingTable",
    "FullyShardedStrategy",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "LayoutMap",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerLostError",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "RingAllReduce",
    "SidecarEvaluator",
    "Strategy",
    "TFConfigClusterResolver",
    "TPUStrategy",
    "ValueContext",
    "WorkerLostError",
    "described_devices",
    "experimental",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "on_each_replica",
]


# Imported at first use: few programs need them, or they import `Model`, which imports this package.
_HOMES = {
    "ClusterCoordinator": "trainer.distribute.parameter_server.coordinator",
    "EmbeddingTable": "trainer.distribute.parameter_server.embedding_table",
    "ParameterServerLostError": "trainer.distribute.parameter_server.processes.failures",
    "ParameterServerStrategy": "trainer.distribute.parameter_server.strategy",
    "RemoteValue": "trainer.distribute.parameter_server.coordinator",
    "SidecarEvaluator": "trainer.model.sidecar_evaluator",
    "WorkerLostError": "trainer.distribute.parameter_server.processes.failures",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
