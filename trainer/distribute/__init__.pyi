from trainer.distribute.cluster import (
    ClusterError as ClusterError,
    ClusterTimeout as ClusterTimeout,
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from trainer.core.replica_context import (
    ReduceOp as ReduceOp,
    ReplicaContext as ReplicaContext,
    get_replica_context as get_replica_context,
)
from trainer.data import AutoShardPolicy as AutoShardPolicy
from trainer.distribute import (
    cluster_resolver as cluster_resolver,
    coordinator as coordinator,
    experimental as experimental,
)
from trainer.distribute.parameter_server.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    RemoteValue as RemoteValue,
)
from trainer.distribute.parameter_server.embedding_table import EmbeddingTable as EmbeddingTable
from trainer.distribute.parameter_server.processes.failures import (
    ParameterServerLostError as ParameterServerLostError,
    WorkerLostError as WorkerLostError,
)
from trainer.distribute.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
from trainer.distribute.placement.described import described_devices as described_devices
from trainer.distribute.replica.collectives import (
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
    RingAllReduce as RingAllReduce,
)
from trainer.distribute.replica.communication_options import (
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from trainer.distribute.replica.distributed_dataset import (
    DistributedDataset as DistributedDataset,
    InputContext as InputContext,
)
from trainer.distribute.replica.on_each_replica import on_each_replica as on_each_replica
from trainer.distribute.replica.per_replica import (
    PerReplica as PerReplica,
    ValueContext as ValueContext,
)
from trainer.distribute.strategies.fully_sharded import (
    CentralStorageStrategy as CentralStorageStrategy,
    FullyShardedStrategy as FullyShardedStrategy,
)
from trainer.distribute.strategies.layout_map import LayoutMap as LayoutMap
from trainer.distribute.strategies.mirrored import (
    MirroredStrategy as MirroredStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    OneDeviceStrategy as OneDeviceStrategy,
    TPUStrategy as TPUStrategy,
)
from trainer.distribute.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from trainer.distribute.strategies.strategy import (
    Strategy as Strategy,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from trainer.engine.model.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
