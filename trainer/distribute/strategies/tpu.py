"""The strategy of a TPU slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from trainer.distribute.placement.devices import find_devices
from trainer.distribute.strategies.strategy import Strategy


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

    def __init__(self, tpu_cluster_resolver: Any = None, devices: Sequence[Any] | None = None):
        super().__init__(_tpu_devices() if devices is None else find_devices(devices))


def _tpu_devices() -> list[jax.Device]:
    try:
        return list(jax.devices("tpu"))
    except RuntimeError as error:
        found = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise RuntimeError(f"There is no TPU here: JAX finds {found} devices only. On a TPU machine, install "
                           "`jax[tpu]` and check that no other process holds the chips; elsewhere use "
                           "`MirroredStrategy`.") from error
