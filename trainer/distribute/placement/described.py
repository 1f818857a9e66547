"""Devices that are not there, but that programs can be compiled for.

Owns how they are named and made, and how placement tells them from devices. JAX compiles for a described topology with
the CUDA plugin, an assembler and CUDA's libdevice: no GPU, no driver and none of CUDA's other libraries are needed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Sharding

from trainer.core import errors
from trainer.distribute.placement.gpu_kinds import GPU_KINDS, GpuKind

EXTRA = "gpu-programs"
_TOPOLOGY = re.compile(r"^(?:(\d+)x)?(\d+)x([a-z]\w*)$", re.IGNORECASE)
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_MAX_DEVICES = 4096
_config: Any = jax.config  # whose attributes JAX declares at run time


class Topology(NamedTuple):
    """So many hosts with so many GPUs each.

    Attributes:
      hosts: see above.
      gpus_per_host: see above.
      kind: a key of `GPU_KINDS`.

    >>> Topology.of("8xh100"), str(Topology.of("2x8xH200"))
    (Topology(hosts=1, gpus_per_host=8, kind='h100'), '2x8xh200')
    """

    hosts: int
    gpus_per_host: int
    kind: str

    @classmethod
    def of(cls, text: Any) -> Topology:
        """Returns the topology that a text such as "8xh100" or "2x8xh200" stands for; a topology as it is.

        Raises:
          TypeError: for what is neither.
          ValueError: for a text of another form, an unknown kind of GPU, or too many or no devices.
        """
        if isinstance(text, Topology):
            return text
        if not isinstance(text, str):
            raise errors.wrong_type("topology", text, "a text such as '8xh100', or '2x8xh100' for two hosts")
        match = _TOPOLOGY.match(text.strip())
        if match is None:
            raise ValueError(f"`topology` must be GPUs x kind, such as '8xh100', or hosts x GPUs x kind, such as "
                             f"'2x8xh100'. Received: {text!r}. Kinds: {', '.join(GPU_KINDS)}.")
        kind = match[3].lower()
        if kind not in GPU_KINDS:
            raise errors.unknown_name("topology", kind, GPU_KINDS)
        topology = cls(int(match[1] or 1), int(match[2]), kind)
        if not 1 <= topology.size <= _MAX_DEVICES:
            raise ValueError(f"`topology` must have 1 to {_MAX_DEVICES} GPUs. Received: {text!r}, of {topology.size}.")
        return topology

    @property
    def size(self) -> int:
        """How many GPUs there are."""
        return self.hosts * self.gpus_per_host

    @property
    def gpu(self) -> GpuKind:
        """What is known of its GPUs."""
        return GPU_KINDS[self.kind]

    def __str__(self) -> str:
        return f"{f'{self.hosts}x' if self.hosts > 1 else ''}{self.gpus_per_host}x{self.kind}"


def described_devices(topology: Any) -> list[jax.Device]:
    """Returns devices that programs can be compiled for, but nothing can be put on, host by host.

    Args:
      topology: a `Topology`, or a text such as "8xh100".

    Raises:
      ImportError: without the CUDA plugin.
      ValueError: for a topology that `Topology.of` refuses.
    """
    described = Topology.of(topology)
    wanted = {"topology": f"1x{described.hosts}x{described.gpus_per_host}",
              "target_config": described.gpu.target_config}
    try:
        return topologies.get_topology_desc(platform="cuda", **wanted).devices
    except NotImplementedError:  # JAX has not registered the plugin: there is none, or it has found no driver
        _register_plugin()
        return topologies.get_topology_desc(platform="cuda", **wanted).devices


def is_plugin_installed() -> bool:
    """Returns whether there is what compiles for described devices."""
    return any(map(_is_there, _PLUGINS))


def is_described(device: jax.Device) -> bool:
    """Returns whether a device is not there."""
    return getattr(getattr(device, "client", None), "runtime_type", None) == "compile_only_runtime"


def are_described(sharding: Sharding) -> bool:
    """Returns whether the devices of a sharding are not there."""
    return is_described(next(iter(sharding.device_set)))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there either
        return False


def _register_plugin() -> None:
    found = [module for module in _PLUGINS if _is_there(module)]
    if not found:
        raise ImportError(
            "Programs for GPUs that are not there are compiled by JAX's CUDA plugin, which is not installed. It needs "
            f"no GPU, no driver and no CUDA: pip install 'trainer-jax[{EXTRA}]'")
    with _platforms("cpu"):  # or the plugin looks for the driver, and registers nothing without it
        importlib.import_module(found[0]).initialize()


@contextlib.contextmanager
def _platforms(names: str) -> Iterator[None]:
    before = _config.jax_platforms
    _config.update("jax_platforms", names)
    try:
        yield
    finally:
        _config.update("jax_platforms", before)
