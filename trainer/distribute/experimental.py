"""The names that `tf.distribute.experimental` has."""

from trainer.distribute.replica.communication_options import CommunicationImplementation, CommunicationOptions
from trainer.distribute.strategies.fully_sharded import CentralStorageStrategy
from trainer.distribute.strategies.multi_worker import MultiWorkerMirroredStrategy
from trainer.distribute.strategies.tpu import TPUStrategy

__all__ = ["CentralStorageStrategy", "CommunicationImplementation", "CommunicationOptions",
           "MultiWorkerMirroredStrategy", "TPUStrategy"]
