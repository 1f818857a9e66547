"""What XLA is told about a program beside its code: the compiler options of programs for GPUs.

Owns the names of XLA's options. Programs for CPUs and TPUs get none.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

CompilerOptions = dict[str, bool | int]


def compiler_options(devices: Sequence[jax.Device], *, deterministic: bool = False) -> CompilerOptions:
    """Returns the options of a program, as `compile_lowered` takes them.

    Args:
      devices: what the program runs on.
      deterministic: whether it gives the same bits each time that it is compiled and run on such devices.

    Source: https://openxla.org/xla/determinism
    """
    if devices[0].platform not in ("gpu", "cuda", "rocm"):
        return {}
    options: CompilerOptions = {}
    if deterministic:
        # No kernel that adds in an order that changes, as scatters do: they are sorted first. And kernels are not
        # timed: of those that can be chosen XLA takes the first, or another process could choose another.
        options["xla_gpu_exclude_nondeterministic_ops"] = True
    return options
