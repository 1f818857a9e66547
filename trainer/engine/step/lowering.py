"""The choice between the two lowerings of a step on a batch, and the reasons against replicas with their own rows.

A step is replicated if it is the default step and its trace proves that rows do not mix: the mean of the replicas'
gradients is then the gradient of the batch. BatchNorm's statistics are known to cover all rows, and random draws for
rows are known to equal the draws on a single device. Everything else is partitioned, which works for any code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from trainer.core import replica_context
from trainer.core.compile.traces.row_mixing import RowsMix, why_rows_mix
from trainer.core.replica_context import ReplicaContext
from trainer.core.train_state import TrainState, shapes_of
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.arrays import shapes_key
from trainer.distribute import Strategy
from trainer.engine.step.compiled_loss import CompiledLoss
from trainer.engine.step.compiled_metrics import CompiledMetrics
from trainer.engine.step.gathered_rows import LOGGER

Outputs = Callable[[TrainState, PyTree], tuple[PyTree, PyTree]]
WhyNotReplicated = Callable[[TrainState, PyTree], str | None]
"""Returns why a step cannot be replicated, from the shapes of the state and of a batch; None if it can."""


class _ProofContext(ReplicaContext):
    """The context of code to replicate: it must not use the other replicas."""

    keys_differ = False

    def _asked(self, *args: Any, **kwargs: Any) -> Any:
        raise RowsMix("it asks for the replicas")

    all_reduce = all_gather = sum = from_first_replica = _asked
    num_replicas_in_sync = property(_asked)
    replica_id_in_sync_group = property(_asked)
    has_whole_batch = property(_asked)


class StepParts(NamedTuple):
    """The parts of a step.

    Attributes:
      overridden: the user's own methods that it calls.
      outputs: returns the module's outputs and its state, from the state and a batch, with BatchNorm in inference mode.
      sows_losses: whether the module adds to the loss.
      microbatches: number of microbatches per batch.
    """

    kind: str
    overridden: Sequence[str]
    outputs: Outputs
    sows_losses: bool
    loss: CompiledLoss
    metrics: CompiledMetrics
    microbatches: int


def why_not_replicated(
    parts: StepParts, shapes: TrainState, replicas: int, batch: PyTree, proofs: dict[Hashable, dict[int, Any]]
) -> str | None:
    """Returns the reason, as a clause, why a step on a batch cannot be replicated; None if it can.

    Args:
      parts: the step.
      shapes: the shapes of the state.
      replicas: number of replicas, which divides the rows.
      batch: the shapes of the batch.
      proofs: earlier results for such steps of the same model, to which the result is added.
    """
    if parts.overridden:
        return f"`{'`, `'.join(parts.overridden)}` may do anything with the batch"
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows // replicas % parts.microbatches:
        return f"{rows // replicas} rows of a replica do not divide by {parts.microbatches} microbatches"
    if parts.kind != "predict":
        if parts.sows_losses:
            return "the module adds to the loss"
        if (reason := parts.loss.why_of_batch() or parts.metrics.why_of_batch()) is not None:
            return reason

    def of_rows(batch: PyTree, state: TrainState) -> Any:
        with replica_context.enter(_ProofContext(jax.tree.leaves(batch)[0].shape[0])):
            outputs, model_state = parts.outputs(state, batch)
            values = parts.loss.custom_values(batch[1], outputs) if len(batch) > 1 else []
        if any(value.shape[:1] != jax.tree.leaves(batch)[0].shape[:1] for value in values):
            raise RowsMix("a loss returns other values than one for each row")
        return outputs, model_state, values

    x, y, _ = unpack_x_y_sample_weight(batch)
    needed = (x, y) if parts.kind != "predict" and y is not None and parts.loss.may_be_custom else (x,)
    leaves, structure = jax.tree.flatten(needed)
    counts = rows // parts.microbatches, rows // replicas // parts.microbatches  # on a single device, and on a replica
    key = parts.kind == "train", structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
    return why_rows_mix(of_rows, needed, shapes, rows=counts, known=proofs.setdefault(key, {}))


class Lowerings:
    """The lowering of the steps of a phase, for each kind of batch: replicated or partitioned.

    Args:
      why_not_replicated: the proof, such as by the function of that name; None if nothing can be proved.
    """

    def __init__(self, kind: str, strategy: Strategy, why_not_replicated: WhyNotReplicated | None):
        self._kind, self._strategy, self._why_not_replicated = kind, strategy, why_not_replicated
        self._reasons: dict[Hashable, str | None] = {}

    def why_partitioned(self, state_shapes: TrainState, batch: PyTree) -> str | None:
        """Returns the reason why a step on a batch of such shapes is partitioned; None if it is replicated."""
        key = shapes_key(batch)
        if key not in self._reasons:
            rows, replicas = key[1][0][0][0], self._strategy.num_replicas_in_sync
            if replicas == 1:
                self._reasons[key] = "there is one replica"
            elif rows % replicas:
                self._reasons[key] = (f"the {rows} rows of the batch do not divide by {replicas} replicas, so that "
                                      "each device computes all of them")
                LOGGER.info("The %s step is partitioned: %s.", self._kind, self._reasons[key])
            elif self._why_not_replicated is None:
                self._reasons[key] = "nothing is known of it"
            elif (because := self._why_not_replicated(shapes_of(state_shapes), shapes_of(batch))) is not None:
                self.partition(batch, because)
            else:
                self._reasons[key] = None
                LOGGER.info("The %s step is replicated.", self._kind)
        return self._reasons[key]

    def partition(self, batch: PyTree, because: str) -> None:
        """Makes steps on batches of such shapes partitioned, and logs the reason."""
        self._reasons[shapes_key(batch)] = because
        LOGGER.info("The %s step is partitioned: %s.", self._kind, because)
        if self._kind == "train" and not self._strategy.cross_device_ops_are_xla:
            warnings.warn(f"The `cross_device_ops` of {self._strategy!r} reduce the gradients of replicas. This train "
                          f"step is one program that XLA divides, as {because}: XLA reduces them. The numbers are the "
                          "same.", stacklevel=2)
