"""The names of `tf.distribute.experimental`."""

import importlib
from typing import TYPE_CHECKING, Any

from trainer.distribute.replica.communication_options import CommunicationImplementation, CommunicationOptions
from trainer.distribute.strategies.fully_sharded import CentralStorageStrategy
from trainer.distribute.strategies.multi_worker import MultiWorkerMirroredStrategy
from trainer.distribute.strategies.tpu import TPUStrategy

if TYPE_CHECKING:
    from trainer.distribute.parameter_server import partitioners
    from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
    from trainer.distribute.parameter_server.strategy import ParameterServerStrategy

__all__ = ["CentralStorageStrategy", "ClusterCoordinator", "CommunicationImplementation", "CommunicationOptions",
           "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "TPUStrategy", "partitioners"]


# Imported at first use, because few programs need them.
_HOMES = {
    "ClusterCoordinator": "trainer.distribute.parameter_server.coordinator",
    "ParameterServerStrategy": "trainer.distribute.parameter_server.strategy",
}


def __getattr__(name: str) -> Any:
    if name == "partitioners":
        return importlib.import_module("trainer.distribute.parameter_server.partitioners")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
