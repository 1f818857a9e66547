"""The number of steps per execution.

It depends on the cost of a step and the size of its batches, never on a clock, so a resumed run decides the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from trainer.core.compile.cost_analysis import Cost
from trainer.core.types import PyTree


class FusingLimits(NamedTuple):
    """Numbers of steps per execution by their cost, in floating-point operations.

    An execution is large enough to hide the cost of a dispatch, and usually much shorter than a second. On CPU, steps
    that take much longer than their dispatch benefit too: they share the memory of their temporary buffers, which the
    system otherwise provides again for each execution.

    An accelerator computes while the host dispatches the next execution, in some 0.2 ms including the loop, so only
    shorter steps benefit: up to 2e10 operations, at the 1e14 per second that an H100 reaches in large products. Fused
    steps still launch their own kernels. An execution of 4e12 then takes 40 ms.

    Attributes:
      small: steps of at most this cost are fused up to `group`.
      group: the cost of an execution of small steps.
      middling: `FEW_STEPS` larger steps of at most this cost are fused. Other steps run alone, and so do steps with
        more than `small` operations in loops, whose iterations take long relative to their arithmetic.
    """

    small: float
    group: float
    middling: float


_CPU_LIMITS = FusingLimits(small=2e8, group=4e9, middling=4e9)
_ACCELERATOR_LIMITS = FusingLimits(small=2e10, group=4e12, middling=2e10)
FEW_STEPS = 4
FUSED_BYTES = 16 * 2**20  # of stacked batches, and of the outputs of a prediction
MAX_FUSED_STEPS = 256


def affordable_steps(step: Cost, stacked: PyTree, is_on_cpu: bool) -> int:
    """Returns the number of steps to fuse for a cost.

    Args:
      step: the cost of a step for a device.
      stacked: the arrays that each step adds to an execution, or their shapes: a batch and, for predictions, its
        outputs.
      is_on_cpu: whether the devices are CPUs.
    """
    limits = _CPU_LIMITS if is_on_cpu else _ACCELERATOR_LIMITS
    if step.flops > limits.middling or step.repeated_flops > limits.small:
        return 1
    wanted = limits.group / max(step.flops, 1.0) if step.flops <= limits.small else FEW_STEPS
    return _power_of_two(min(wanted, FUSED_BYTES / _nbytes(stacked), MAX_FUSED_STEPS))


def _nbytes(tree: PyTree) -> int:
    """Returns the number of bytes of a tree of arrays or shapes, at least 1."""
    return max(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)), 1)


def _power_of_two(most: float) -> int:
    """Returns the largest power of two that is at most `most`, at least 1."""
    return 2 ** (int(max(most, 1.0)).bit_length() - 1)
