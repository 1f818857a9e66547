"""The names that `tf.distribute.experimental` has."""

from trainer.distribute.communication import CommunicationImplementation, CommunicationOptions
from trainer.distribute.fully_sharded import CentralStorageStrategy
from trainer.distribute.multi_worker import MultiWorkerMirroredStrategy
from trainer.distribute.tpu import TPUStrategy

__all__ = ["CentralStorageStrategy", "CommunicationImplementation", "CommunicationOptions",
           "MultiWorkerMirroredStrategy", "TPUStrategy"]
