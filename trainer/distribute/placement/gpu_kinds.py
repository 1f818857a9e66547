"""Kinds of GPUs: targets of XLA's compiler, and rates for estimates of time.

Owns these figures and their sources. A new kind needs its target configuration here.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class GpuKind(NamedTuple):
    """A kind of GPU, in the form for servers with several GPUs (SXM).

    Attributes:
      name: name reported by the driver.
      memory_bytes: total memory reported by the driver.
      memory_bandwidth: peak memory bandwidth in bytes per second.
      peak_flops: peak operations per second of dense products by operand dtype; "tensorfloat32" is float32 at JAX's
        default precision.
      link_bandwidth: bytes per second to the other GPUs of its host, in each direction (NVLink).
      compute_capability: major and minor version of its instructions.
      target_config: XLA's `GpuTargetConfigProto`, in text form.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    link_bandwidth: float
    compute_capability: tuple[int, int]
    target_config: str


# The figures are from XLA's own descriptions: openxla/xla, xla/backends/gpu/target_config/specs, 2026.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {ghz}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_per_block}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


def _kind(name: str, memory: int, bandwidth: int, peak_flops: dict[str, float], link_bandwidth: float,
          major: int, **target: float) -> GpuKind:
    config = _TARGET.format(name=name, memory=memory, bandwidth=bandwidth, major=major, **target)
    return GpuKind(name, memory, float(bandwidth), peak_flops, link_bandwidth, (major, 0), config)


_HOPPER: dict[str, Any] = {"shared_per_core": 233472, "cores": 132, "fpus": 128, "l2": 52428800, "ghz": 1.98,
           "shared_per_block": 232448, "major": 9}
# NVIDIA's data sheets, without sparsity.
_HOPPER_PEAKS = {"float64": 67e12, "float32": 67e12, "tensorfloat32": 494.7e12, "bfloat16": 989.4e12,
                 "float16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12}
_AMPERE_PEAKS = {"float64": 19.5e12, "float32": 19.5e12, "tensorfloat32": 156e12, "bfloat16": 312e12,
                 "float16": 312e12, "int8": 624e12}

GPU_KINDS = {
    "a100": _kind("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040_000_000, _AMPERE_PEAKS, 300e9,
                  shared_per_core=167936, cores=108, fpus=64, l2=41943040, ghz=1.41, shared_per_block=166912, major=8),
    "h100": _kind("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000, _HOPPER_PEAKS, 450e9, **_HOPPER),
    "h200": _kind("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000, _HOPPER_PEAKS, 450e9, **_HOPPER),
}
CUDNN_VERSION = 90700  # of the target configurations, as `cudnnGetVersion` numbers it
NETWORK_BANDWIDTH = 50e9  # bytes per second of a GPU to other hosts: a 400 Gb/s adapter for each, as in a DGX
