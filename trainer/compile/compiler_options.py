"""XLA's compiler options: for steps on GPUs, and for programs that run once on CPUs.

Owns the names of XLA's options. Other programs get none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

CompilerOptions = dict[str, bool | int]

_LEVEL = "xla_backend_optimization_level"  # of LLVM's optimizations


def options_of_one_run(device: jax.Device) -> CompilerOptions:
    """Returns the options of a program that runs once, such as an initialisation: it is to compile fast.

    Levels from 1 on give the same bits, and 3, XLA's default, takes up to twice the time of 1. A level that the user
    has set is left as it is.

    Args:
      device: one of those that it runs on.
    """
    is_set = _LEVEL in os.environ.get("XLA_FLAGS", "")
    return {_LEVEL: 1} if device.platform == "cpu" and not is_set else {}


def compiler_options(
    devices: Sequence[jax.Device], *, deterministic: bool = False, overlap: bool = True, bytes_per_pack: int = 0
) -> CompilerOptions:
    """Returns the options of a program, as `compile_lowered` takes them.

    Args:
      devices: what the program runs on.
      deterministic: whether it gives the same bits each time that it is compiled and run on such devices.
      overlap: whether collectives are scheduled beside other work.
      bytes_per_pack: up to how many bytes XLA joins collectives; 0 leaves it to XLA.

    Source: https://openxla.org/xla/determinism and https://openxla.org/xla/flags_guidance
    """
    if devices[0].platform not in ("gpu", "cuda", "rocm"):
        return {}
    options: CompilerOptions = {}
    if deterministic:
        # No kernel that adds in an order that changes, as scatters do: they are sorted first.
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # And kernels are not timed, or another process could choose another: XLA takes the first that it can. Recent
        # versions do so for the option above, too.
        options["xla_gpu_deterministic_ops"] = True
    if len(devices) > 1:
        options["xla_gpu_enable_latency_hiding_scheduler"] = overlap
        if not overlap:  # for Hopper XLA has an estimator of its own, which turns the scheduler on again
            options["xla_gpu_enable_analytical_sol_latency_estimator"] = False
        if bytes_per_pack:
            options.update({f"xla_gpu_{collective}_combine_threshold_bytes": bytes_per_pack
                            for collective in ("all_reduce", "all_gather", "reduce_scatter")})
    return options
