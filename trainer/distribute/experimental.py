"""The names that `tf.distribute.experimental` has."""

from trainer.distribute.parameter_server import partitioners
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
from trainer.distribute.parameter_server.strategy import ParameterServerStrategy
from trainer.distribute.replica.communication_options import CommunicationImplementation, CommunicationOptions
from trainer.distribute.strategies.fully_sharded import CentralStorageStrategy
from trainer.distribute.strategies.multi_worker import MultiWorkerMirroredStrategy
from trainer.distribute.strategies.tpu import TPUStrategy

__all__ = ["CentralStorageStrategy", "ClusterCoordinator", "CommunicationImplementation", "CommunicationOptions",
           "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "TPUStrategy", "partitioners"]
