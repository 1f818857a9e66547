"""Devices by name, index or object."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from trainer.core import errors

_NAME = re.compile(r"^/?(?:device:)?([a-z]+)(?::(\d+))?$", re.IGNORECASE)


def find_device(device: object, argument: str = "devices") -> jax.Device:
    """Returns the local device for a name, index or object.

    Args:
      device: a `jax.Device`, an index into `jax.local_devices()`, or a name such as "cpu:0", "gpu:1" or "/GPU:1".
      argument: the argument's name, for error messages.

    Raises:
      ValueError: if there is no such device.
      TypeError: if `device` has another type.
    """
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, int) and not isinstance(device, bool):
        local = jax.local_devices()
        if not 0 <= device < len(local):
            raise ValueError(f"`{argument}` has index {device}, but there are {len(local)} local devices: "
                             f"{_list(local)}.")
        return local[device]
    if not isinstance(device, str):
        raise errors.wrong_type(argument, device, "a device name such as 'gpu:0', an index or a jax.Device")
    match = _NAME.match(device)
    if match is None:
        raise ValueError(f"`{argument}` has {device!r}, which is not a device name. Names look like 'cpu:0' or "
                         "'gpu:1'.")
    platform, index = match[1].lower(), int(match[2] or 0)
    try:
        known = jax.local_devices(backend=platform)
    except RuntimeError:
        raise ValueError(f"`{argument}` has {device!r}, but JAX has no {platform!r} backend here. "
                         f"Local devices: {_list(jax.local_devices())}. Leave `{argument}` out to use these, or "
                         "install JAX for your hardware, such as `pip install \"jax[cuda12]\"`; `python -m trainer "
                         "doctor` says what is missing.") from None
    if index >= len(known):
        hint = (" Simulated CPU devices are made by XLA_FLAGS=--xla_force_host_platform_device_count=N, set before JAX "
                "starts." if platform == "cpu" else "")
        raise ValueError(f"`{argument}` has {device!r}, but the local {platform} devices are {_list(known)}.{hint}")
    return known[index]


def find_devices(devices: Sequence[Any] | None, argument: str = "devices") -> list[jax.Device]:
    """Returns the local devices for a sequence of names, indices or objects; all local devices for None.

    Raises:
      ValueError: if `devices` is empty, names a device twice, or names a device that does not exist.
      TypeError: if `devices` is not a sequence of devices.
    """
    if devices is None:
        return list(jax.local_devices())
    if isinstance(devices, (str, jax.Device)):
        devices = [devices]
    if not isinstance(devices, Sequence):
        count = devices if isinstance(devices, int) and devices > 0 else 2
        raise errors.wrong_type(argument, devices, f"a list of devices, such as `jax.local_devices()[:{count}]` for "
                                f"the first {count}")
    if not devices:
        raise ValueError(f"`{argument}` is empty. Give at least one device, or None for all local devices.")
    found = [find_device(device, argument) for device in devices]
    for index, device in enumerate(found):
        if device in found[:index]:
            raise ValueError(f"`{argument}` names {_name(device)} twice. Each replica needs a device of its own.")
    return found


def default_devices() -> list[jax.Device]:
    """Returns all local accelerators, or one CPU device on a machine without accelerators."""
    local = jax.local_devices()
    return list(local) if local[0].platform != "cpu" else local[:1]


def memory_bytes(device: jax.Device) -> int:
    """Returns the total memory in bytes that JAX may use on a device of this process.

    For a CPU device this is its share of the machine's memory. It is 0 for other devices that do not report their
    memory, so that only forced arrays stay there. Free memory would make decisions differ between runs.
    """
    if device.platform != "cpu":
        return int((device.memory_stats() or {}).get("bytes_limit", 0))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _list(devices: Sequence[jax.Device]) -> str:
    return ", ".join(_name(device) for device in devices)
