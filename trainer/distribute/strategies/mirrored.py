"""Single-process strategies that keep a whole copy of the state on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from trainer.core import errors
from trainer.distribute.placement.devices import find_device, find_devices
from trainer.distribute.replica.collectives import CrossDeviceOps
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
