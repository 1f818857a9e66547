"""cuDNN's attention in programs for described GPUs.

JAX asks the local cuDNN and the local GPUs whether they can run `jax.nn.dot_product_attention(implementation="cudnn")`
when it traces a program, and has no option to ask about the devices that the program is for. Measured with jax 0.10.2
and 0.12. `tests/gpu_programs/test_attention.py` fails when JAX no longer needs this workaround.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from trainer.core.ambient.workarounds import are_on
from trainer.distribute.placement.gpu_kinds import CUDNN_VERSION, GpuKind

_lock = threading.RLock()  # one kind of GPU at a time


@contextlib.contextmanager
def traced_for(kind: GpuKind) -> Iterator[None]:
    """Traces programs in the block for GPUs of a kind, with cuDNN, which need not be on this machine."""
    if not are_on():
        yield
        return
    # Imported late: users who plan nothing, or use no attention, need no private module of JAX.
    from jax._src.cudnn import fused_attention_stablehlo as attention

    def is_at_least(capability: str) -> bool:
        return kind.compute_capability >= _numbers(capability)

    def is_equal(capability: str) -> bool:
        return kind.compute_capability == _numbers(capability)

    answers: dict[str, Any] = {
        "check_cudnn_version": lambda: CUDNN_VERSION, "check_compute_capability": is_at_least,
        "is_cuda_compute_capability_equal": is_equal}
    with _lock, mock.patch.multiple(attention, **answers):
        yield


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
