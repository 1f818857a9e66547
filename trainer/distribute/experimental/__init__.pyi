from trainer.distribute.experimental import partitioners as partitioners
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator as ClusterCoordinator
from trainer.distribute.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
from trainer.distribute.replica.communication_options import (
    CollectiveCommunication as CollectiveCommunication,
    CollectiveHints as CollectiveHints,
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from trainer.distribute.replica.per_replica import ValueContext as ValueContext
from trainer.distribute.strategies.fully_sharded import CentralStorageStrategy as CentralStorageStrategy
from trainer.distribute.strategies.mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    TPUStrategy as TPUStrategy,
)
