"""Described devices: devices that are absent, but that programs can be compiled for.

Owns their names, their creation, and the check for them. JAX compiles for a described topology with the CUDA plugin, an
assembler and CUDA's libdevice. It needs no GPU, no driver and no other CUDA library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.experimental import topologies

from trainer.core import errors
from trainer.core.ambient.jax_options import jax_config
from trainer.core.calls.entry_points import explains_arguments
from trainer.distribute.placement.gpu_kinds import GPU_KINDS, GpuKind

EXTRA = "gpu-programs"
_TOPOLOGY = re.compile(r"^(?:(\d+)x)?(\d+)x([a-z]\w*)$", re.IGNORECASE)
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_MAX_DEVICES = 4096


class Topology(NamedTuple):
    """Hosts with GPUs.

    Attributes:
      hosts: number of hosts.
      gpus_per_host: number of GPUs of each host.
      kind: a key of `GPU_KINDS`.

    >>> Topology.of("8xh100"), str(Topology.of("2x8xH200"))
    (Topology(hosts=1, gpus_per_host=8, kind='h100'), '2x8xh200')
    """

    hosts: int
    gpus_per_host: int
    kind: str

    @classmethod
    def of(cls, text: str | Topology) -> Topology:
        """Returns the topology of a text such as "8xh100" or "2x8xh200"; a topology is returned as it is.

        Raises:
          TypeError: if `text` is neither a text nor a topology.
          ValueError: if the text has another form, an unknown kind of GPU, or too many or no devices.
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
        """Number of GPUs."""
        return self.hosts * self.gpus_per_host

    @property
    def gpu(self) -> GpuKind:
        """Properties of its GPUs."""
        return GPU_KINDS[self.kind]

    def __str__(self) -> str:
        return f"{f'{self.hosts}x' if self.hosts > 1 else ''}{self.gpus_per_host}x{self.kind}"


@explains_arguments
def described_devices(topology: str | Topology) -> list[jax.Device]:
    """Returns devices, host by host, that programs can be compiled for, but that nothing can be placed on.

    Args:
      topology: a `Topology`, or a text such as "8xh100".

    Raises:
      ImportError: if the CUDA plugin is not installed.
      ValueError: if `Topology.of` refuses the topology.
    """
    described = Topology.of(topology)
    wanted = {"topology": f"1x{described.hosts}x{described.gpus_per_host}",
              "target_config": described.gpu.target_config}
    try:
        return topologies.get_topology_desc(platform="cuda", **wanted).devices
    except NotImplementedError:  # JAX has not registered the plugin: it is not installed, or found no driver
        _register_plugin()
        return topologies.get_topology_desc(platform="cuda", **wanted).devices


def is_plugin_installed() -> bool:
    """Returns whether the plugin that compiles for described devices is installed."""
    return any(map(_is_there, _PLUGINS))


def is_described(device: jax.Device) -> bool:
    """Returns whether a device is only described."""
    return getattr(getattr(device, "client", None), "runtime_type", None) == "compile_only_runtime"


def kind_of(device: jax.Device) -> str | None:
    """Returns the key in `GPU_KINDS` of a device's kind; None for other devices."""
    return next((kind for kind, gpu in GPU_KINDS.items() if gpu.name == device.device_kind), None)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing too
        return False


def _register_plugin() -> None:
    found = [module for module in _PLUGINS if _is_there(module)]
    if not found:
        raise ImportError(
            "Programs for GPUs that are not there are compiled by JAX's CUDA plugin, which is not installed. It needs "
            f"no GPU, no driver and no CUDA: pip install 'trainer-jax[{EXTRA}]'")
    with _platforms("cpu"):  # otherwise the plugin looks for the driver, and registers nothing without it
        importlib.import_module(found[0]).initialize()


@contextlib.contextmanager
def _platforms(names: str) -> Iterator[None]:
    before = jax_config.jax_platforms
    jax_config.update("jax_platforms", names)
    try:
        yield
    finally:
        jax_config.update("jax_platforms", before)
