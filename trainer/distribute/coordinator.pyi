from trainer.distribute.parameter_server.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    RemoteValue as RemoteValue,
)
