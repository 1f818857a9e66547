"""How many steps go into one execution.

Decided by what a step computes and what its batches take, never by a clock: a resumed run decides the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from trainer.compile.cost_analysis import Cost
from trainer.core.types import PyTree


class FusingLimits(NamedTuple):
    """How many steps of what cost, in floating-point operations, go into one execution.

    Enough to hide the cost of a dispatch, little enough that an execution takes well below a second as a rule. On CPU,
    steps that take much longer than their dispatch gain too: the memory of their temporary buffers, which comes from
    the system again for each execution, is shared.

    An accelerator computes while the host dispatches the next execution, in some 0.2 ms with all that the loop does, so
    that only steps of less gain: of 2e10 operations, at the 1e14 a second that an H100 reaches in large products. Fused
    steps still launch each kernel of their own. An execution of 4e12 takes 40 ms then.

    Attributes:
      small: steps of at most this cost are fused up to `group`.
      group: the cost of an execution of small steps.
      middling: of larger steps of at most this cost, `FEW_STEPS` are fused. Others run on their own, and so do those
        with more than `small` in loops, whose turns take long for their arithmetic.
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
    """Returns how many steps of a cost to fuse.

    Args:
      step: what a device computes in one step.
      stacked: what each step adds to an execution: a batch and, of a prediction, its outputs, as arrays or shapes.
      is_on_cpu: whether the devices are CPUs.
    """
    limits = _CPU_LIMITS if is_on_cpu else _ACCELERATOR_LIMITS
    if step.flops > limits.middling or step.repeated_flops > limits.small:
        return 1
    wanted = limits.group / max(step.flops, 1.0) if step.flops <= limits.small else FEW_STEPS
    return _power_of_two(min(wanted, FUSED_BYTES / _nbytes(stacked), MAX_FUSED_STEPS))


def _nbytes(tree: PyTree) -> int:
    """Returns how many bytes the leaves of a tree of arrays or shapes take, at least one."""
    return max(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)), 1)


def _power_of_two(most: float) -> int:
    """Returns the largest power of two that is at most `most`; 1 for less than that."""
    return 2 ** (int(max(most, 1.0)).bit_length() - 1)
