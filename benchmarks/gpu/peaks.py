"""The peaks of GPUs."""

from __future__ import annotations


def peak_flops(device_kind: str) -> float | None:
    """Returns the operations a second of a device with dense matrices of 16 bits; None if that is not known.

    Args:
      device_kind: JAX's name of it.

    >>> peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    True
    """
    # Here, as the suite's own process need not find the trainer.
    from trainer.callbacks.throughput import _PEAK_FLOPS_PER_SEC
    from trainer.distribute.placement.gpu_kinds import GPU_KINDS

    for kind in GPU_KINDS.values():
        if device_kind and kind.name.startswith(device_kind):  # the driver may leave the memory's size out
            return kind.peak_flops["bfloat16"]
    return _PEAK_FLOPS_PER_SEC.get(device_kind)
