"""XLA's compiler options for steps on GPUs, and for programs that run once on CPUs.

Owns the names of XLA's options. Other programs get none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

CompilerOptions = dict[str, bool | int]

_LEVEL = "xla_backend_optimization_level"  # LLVM's optimization level


def options_of_one_run(device: jax.Device) -> CompilerOptions:
    """Returns the options of a program that runs once, such as an initialization, and must compile fast.

    All levels from 1 on give the same bits, and XLA's default, 3, takes up to twice the time of 1. A level set by the
    user stays as it is.

    Args:
      device: a device of the program.
    """
    is_set = _LEVEL in os.environ.get("XLA_FLAGS", "")
    return {_LEVEL: 1} if device.platform == "cpu" and not is_set else {}


def compiler_options(
    devices: Sequence[jax.Device], *, deterministic: bool = False, overlap: bool = True, bytes_per_pack: int = 0
) -> CompilerOptions:
    """Returns the options of a program for `compile_lowered`.

    Args:
      devices: devices of the program.
      deterministic: whether the program gives the same bits each time that it is compiled and run on such devices.
      overlap: whether collectives are scheduled beside other work.
      bytes_per_pack: maximum bytes of the collectives that XLA joins; 0 leaves it to XLA.

    Source: https://openxla.org/xla/determinism and https://openxla.org/xla/flags_guidance
    """
    if devices[0].platform not in ("gpu", "cuda", "rocm"):
        return {}
    options: CompilerOptions = {}
    if deterministic:
        # No kernels that add in a varying order, such as scatters: these are sorted first.
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # No timing of kernels, which could choose different kernels in another process: XLA takes the first kernel that
        # works. Recent versions do so for the option above, too.
        options["xla_gpu_deterministic_ops"] = True
    if len(devices) > 1:
        options["xla_gpu_enable_latency_hiding_scheduler"] = overlap
        if not overlap:  # XLA's own estimator for Hopper turns the scheduler on again
            options["xla_gpu_enable_analytical_sol_latency_estimator"] = False
        if bytes_per_pack:
            options.update({f"xla_gpu_{collective}_combine_threshold_bytes": bytes_per_pack
                            for collective in ("all_reduce", "all_gather", "reduce_scatter")})
    return options
