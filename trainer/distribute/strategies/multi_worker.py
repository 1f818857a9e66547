"""Synchronous training over the devices of several processes, on one machine or many."""

from __future__ import annotations

import jax

from trainer.distribute.cluster import join_cluster
from trainer.distribute.placement.devices import default_devices
from trainer.distribute.replica.collectives import CrossDeviceOps, NcclAllReduce, RingAllReduce
from trainer.distribute.replica.communication_options import (
    CommunicationImplementation,
    CommunicationOptions,
    checked_options,
)
from trainer.distribute.strategies.strategy import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of several processes, each with a copy of the state.

    Every process runs the same script with the same data and takes the rows of its own replicas. Weights, losses,
    metrics and predictions are the same as on one device, in all processes.

    TF_CONFIG, Open MPI or SLURM names the processes, or JAX finds them (Kubernetes, TPU). Without a cluster there is
    one process, and this is `MirroredStrategy`. Make the strategy before JAX is used for anything else.

    Args:
      communication_options: `implementation`, `bytes_per_pack` and `overlap` control the reduction of gradients.
        `timeout_seconds` is the time to wait for the other processes, at the start and while training, 300 by default.
        It must exceed the longest execution, callback and wait for data.

    Raises:
      ClusterError: if the description of the cluster is wrong, or the processes were started with different clusters,
        jobs or versions.
      ClusterTimeout: if not all processes arrive in time; it names the missing processes.
      RuntimeError: if JAX has already used its devices.
      TypeError: if `communication_options` has another type.

    Source: `tf.distribute.MultiWorkerMirroredStrategy`.

    Example, without a cluster:

      >>> MultiWorkerMirroredStrategy().mesh.axis_names
      ('replica',)
    """

    def __init__(self, communication_options: CommunicationOptions | None = None):
        options = checked_options(communication_options) or CommunicationOptions()
        join_cluster(options.timeout_seconds)
        devices = jax.devices() if jax.process_count() > 1 else default_devices()
        super().__init__(devices, _reduction(options))


def _reduction(options: CommunicationOptions) -> CrossDeviceOps:
    ring = options.implementation is CommunicationImplementation.RING
    return RingAllReduce(options=options) if ring else NcclAllReduce(options=options)
