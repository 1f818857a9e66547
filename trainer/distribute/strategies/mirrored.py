"""Strategies that keep a whole copy of the state on each device: on a device, a machine, several processes or a TPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from trainer.core import errors
from trainer.distribute.cluster import TFConfigClusterResolver, cluster_devices
from trainer.distribute.placement.devices import find_device, find_devices
from trainer.distribute.replica.collectives import CrossDeviceOps, NcclAllReduce, RingAllReduce
from trainer.distribute.replica.communication_options import (
    CommunicationImplementation,
    CommunicationOptions,
    checked_options,
)
from trainer.distribute.replica.tensorflow_names import missing
from trainer.distribute.strategies.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """Training on a single device.

    Args:
      device: a device name such as "gpu:0", an index into `jax.local_devices()`, or a `jax.Device`.

    Raises:
      ValueError: if there is no such device.
      TypeError: if `device` has another type.

    Example:
      >>> OneDeviceStrategy("cpu:0").num_replicas_in_sync
      1
    """

    def __init__(self, device: int | str | jax.Device = 0):
        super().__init__([find_device(device, "device")])

    def _mesh_over(self, devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
        return devices[:1]


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine, each with a copy of the state.

    Each batch is split by rows over the devices, gradients are averaged, and every device makes the same update.
    Weights, losses, metrics and predictions are the same as on one device.

    Args:
      devices: device names such as "gpu:0", indices into `jax.local_devices()`, or `jax.Device`s. All local devices
        by default.
      cross_device_ops: the reduction of gradients: `NcclAllReduce()`, the default, `HierarchicalCopyAllReduce()`,
        `ReductionToOneDevice()` or `RingAllReduce()`.

    Raises:
      ValueError: if `devices` is empty, names a device twice, or names a device that does not exist.
      TypeError: if `devices` is not a sequence of devices, or `cross_device_ops` is not a reduction.

    Example:
      >>> with MirroredStrategy(["cpu:0"]).scope() as strategy:
      ...     strategy.num_replicas_in_sync
      1
    """

    def __init__(self, devices: Sequence[Any] | None = None, cross_device_ops: CrossDeviceOps | None = None):
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise errors.wrong_type("cross_device_ops", cross_device_ops, "a reduction such as NcclAllReduce()")
        super().__init__(find_devices(devices), cross_device_ops)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of several processes, each with a copy of the state.

    Every process runs the same script with the same data and takes the rows of its own replicas. Weights, losses,
    metrics and predictions are the same as on one device, in all processes.

    TF_CONFIG, Open MPI or SLURM names the processes, or JAX finds them (Kubernetes, TPU). Without a cluster there is
    one process, and this is `MirroredStrategy` on all its devices. Make the strategy before JAX is used for anything
    else.

    Args:
      communication_options: `implementation`, `bytes_per_pack` and `overlap` control the reduction of gradients.
        `timeout_seconds` is the time to wait for the other processes, at the start and while training, 300 by default.
        It must exceed the longest execution, callback and wait for data. A `CommunicationImplementation` stands for
        options with this implementation.
      cluster_resolver: the cluster, instead of the detected cluster. As in TensorFlow, it may also be the first
        argument, followed by the options.
      communication: a `CommunicationImplementation` or its name: TensorFlow's older form of the options.

    Raises:
      ClusterError: if the description of the cluster is wrong, the processes were started with different clusters, jobs
        or versions, or this process has already joined a cluster that is not the resolver's.
      ClusterTimeout: if not all processes arrive in time; it names the missing processes.
      RuntimeError: if JAX has already used its devices.
      TypeError: if an argument has another type.
      ValueError: if both `communication` and `communication_options` are given.

    Source: `tf.distribute.MultiWorkerMirroredStrategy` and `tf.distribute.experimental.MultiWorkerMirroredStrategy`.

    Example, without a cluster:
      >>> strategy = MultiWorkerMirroredStrategy()
      >>> strategy.num_replicas_in_sync == MirroredStrategy().num_replicas_in_sync
      True
    """

    def __init__(
        self, communication_options: CommunicationOptions | CommunicationImplementation | None = None,
        cluster_resolver: TFConfigClusterResolver | None = None, *,
        communication: CommunicationImplementation | str | None = None,
    ):
        given: Any = communication_options
        if isinstance(given, TFConfigClusterResolver) or isinstance(cluster_resolver, CommunicationOptions):
            given, cluster_resolver = cluster_resolver, given
        if communication is not None:
            if given is not None:
                raise ValueError("`communication` is the old name of `communication_options`. Give one of them.")
            given = CommunicationImplementation.of(communication)
        if isinstance(given, CommunicationImplementation):
            given = CommunicationOptions(implementation=given)
        if cluster_resolver is not None and not isinstance(cluster_resolver, TFConfigClusterResolver):
            raise errors.wrong_type("cluster_resolver", cluster_resolver, "a TFConfigClusterResolver, or None for the "
                                    "cluster of TF_CONFIG, SLURM, Open MPI, Kubernetes or a TPU")
        options = checked_options(given) or CommunicationOptions()
        super().__init__(cluster_devices(options.timeout_seconds, cluster_resolver), _reduction(options))


class TPUStrategy(Strategy):
    """Synchronous training on the chips of a TPU slice, each with a copy of the state.

    Args:
      tpu_cluster_resolver: not used, because JAX finds the slice; here for scripts written for `tf.distribute`.
      devices: the devices to use, as in `MirroredStrategy`; by default all chips of the slice.

    Raises:
      RuntimeError: if no devices are given and there is no TPU.
      ValueError: if a device cannot be used.

    Source: `tf.distribute.TPUStrategy`.

    Example, on a simulated slice:
      >>> TPUStrategy(devices=["cpu:0"]).num_replicas_in_sync
      1
    """

    _foreign_names = missing("TPUStrategy")

    def __init__(self, tpu_cluster_resolver: Any = None, devices: Sequence[Any] | None = None):
        super().__init__(_tpu_devices() if devices is None else find_devices(devices))


def _reduction(options: CommunicationOptions) -> CrossDeviceOps:
    ring = options.implementation is CommunicationImplementation.RING
    return RingAllReduce(options=options) if ring else NcclAllReduce(options=options)


def _tpu_devices() -> list[jax.Device]:
    try:
        return list(jax.devices("tpu"))
    except RuntimeError as error:
        found = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise RuntimeError(f"There is no TPU here: JAX finds {found} devices only. On a TPU machine, install "
                           "`jax[tpu]` and check that no other process holds the chips; elsewhere use "
                           "`MirroredStrategy`.") from error
