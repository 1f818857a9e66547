"""Context of a train step that records gradients; servers make the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from trainer.core.replica_context import ReduceOp, ReplicaContext
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.rows.served_rows import Absent

_MADE_ELSEWHERE = ("Under ParameterServerStrategy, the servers update the parameters when the step has ended, so that "
                   "a step cannot {}. Take all gradients first and apply them once, as "
                   "`state.apply_gradients(generator=..., discriminator=...)`; log what depends on new parameters in a "
                   "callback.")


class _Unknown(Absent):
    """An updated parameter, which is not available in the step."""

    def __init__(self, leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        super().__init__(leaf.shape, leaf.dtype,
                         lambda: ValueError(_MADE_ELSEWHERE.format("use them after `apply_gradients`")))


class PushContext(ReplicaContext):
    """The step of a worker.

    Args:
      rows: number of rows of its batch.

    Attributes:
      grads: the gradients applied by the step, by module for a dict of modules; None if it has applied none.
      value: the loss given with the gradients; None without a loss.
    """

    pushes_gradients = True

    def __init__(self, rows: int):
        super().__init__(rows)
        self.grads: Any = None
        self.value: Any = None
        self._is_applied = False

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        if self._is_applied:
            raise ValueError(_MADE_ELSEWHERE.format("apply gradients twice"))
        self._is_applied, self.grads = True, grads
        return grads

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        self.value = extra.get("value")
        return jax.tree.map(_Unknown, params), opt_state
