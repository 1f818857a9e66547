"""The replica of the code being traced, and its reductions over all replicas.

Owns the current replica context and the names of the reductions. It must not name a collective: collectives between
devices live in `distribute/replica/collectives.py`, behind the subclass that a compiled step enters.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from trainer.core.ambient import state
from trainer.core.rng import stream_key
from trainer.core.types import PyTree

#: Advice in messages about padding.
MEAN_OVER_ROWS = (
    "take a mean over rows as `(values * context.row_mask).sum() * context.num_replicas_in_sync / context."
    "global_rows`, with `context = trainer.distribute.get_replica_context()`. Or choose a batch size that leaves no "
    "such batch.")


class ReduceOp(enum.Enum):
    """Reductions of values from several replicas."""

    SUM = "sum"
    MEAN = "mean"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the member for `op`, which may be its name in any case, as in `tf.distribute`."""
        try:
            return op if isinstance(op, cls) else cls(str(op).lower())
        except ValueError:
            raise ValueError(
                f'A reduction must be "sum" or "mean", or ReduceOp.SUM or ReduceOp.MEAN. Received: {op!r}.') from None


def divide_sum(total: jax.Array, divisor: jax.Array | int | None) -> jax.Array:
    """Returns `total / divisor`, or 0 where the divisor is 0, or `total` if the divisor is None."""
    if divisor is None:
        return total
    divisor = jnp.asarray(divisor, total.dtype)
    return jnp.where(divisor == 0, 0, total / jnp.where(divisor == 0, 1, divisor))


class _Untold(str):
    """A string that differs from equal strings by identity."""


#: Reduction of gradients over replicas if a step does not set it.
MEAN_BY_DEFAULT = _Untold(ReduceOp.MEAN.value)


class ReplicaContext:
    """A replica's view of a step: its number, its rows and the reductions over all replicas.

    This base class is a group of a single replica: every reduction returns its argument. It is the context of the steps
    of `fit`, `evaluate` and `predict`, which see the whole batch, and of code outside of any step.

    Attributes:
      num_replicas_in_sync: number of replicas that run this step together.
      is_part: whether the rows are a microbatch, and not all of the replica's rows of the batch.
      batch_norm_groups: number of replicas whose rows the batch holds; with `batch_norm="per_replica"`, BatchNorm
        normalizes the rows of each replica on their own.
      has_whole_batch: whether code of a step that several devices divide sees a single replica.
      keys_differ: whether each replica has different random keys.
      pushes_gradients: whether parameter servers apply the gradients, after the step.
      mask_reads: number of times that code has read which rows are padding, to detect code that does not.
      is_told_reduction: whether the last call of `apply_gradients` set the reduction of gradients over the replicas.
      untold_reductions: number of calls that did not set it.
      new_averages: paths of the running averages of BatchNorm that a step has computed, to detect a step that drops
        them.
    """

    num_replicas_in_sync: int = 1
    is_part = False
    batch_norm_groups: int = 1
    has_whole_batch: bool = False
    keys_differ: bool = True
    pushes_gradients: bool = False

    def __init__(self, rows: int | None = None, row_mask: jax.Array | None = None):
        self.rows = rows
        self.mask_reads = 0
        self.is_told_reduction = True
        self.untold_reductions = 0
        self.new_averages: set[str] = set()
        self._row_mask = row_mask

    @property
    def is_padded(self) -> bool:
        """Whether some rows, on any replica, pad the batch."""
        return self._row_mask is not None

    @property
    def padding_mask(self) -> jax.Array | None:
        """`row_mask`, or None without padding, as in the steps of `fit`, whose batches are cut to their rows."""
        self.mask_reads += 1
        return self._row_mask

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """Number of this replica, an int32 scalar in `[0, num_replicas_in_sync)`."""
        return 0

    def random_key(self, seed: int | jax.Array, stream: str, step: int | jax.Array) -> jax.Array:
        """Returns this replica's key of a random stream; see `trainer.core.rng`."""
        return stream_key(seed, stream, step, self.replica_id_in_sync_group if self.keys_differ else 0)

    @property
    def row_mask(self) -> jax.Array:
        """1.0 for this replica's real rows and 0.0 for rows that pad the last batch; float32, shape `(rows,)`."""
        mask = self.padding_mask
        if mask is not None:
            return mask
        if self.rows is None:
            raise RuntimeError("`row_mask` is only known inside a step: read it in the function given to "
                               "`strategy.run`, or in `train_step`, `test_step`, `predict_step` or `compute_loss`.")
        return jnp.ones((self.rows,), jnp.float32)

    @property
    def global_rows(self) -> int | jax.Array:
        """Number of real rows of the batch over all replicas: an int, or a float32 scalar in a padded batch."""
        if self._row_mask is not None:  # does not count as a read of the mask: a number alone masks no row
            return self.sum(self._row_mask.sum())
        if self.rows is None:
            raise RuntimeError("`global_rows` is only known inside a step.")
        return self.rows * self.num_replicas_in_sync

    @property
    def row_share(self) -> float | jax.Array:
        """This replica's share of the real rows of the batch. The shares of all replicas add up to 1."""
        if self._row_mask is None:
            return 1.0 / self.num_replicas_in_sync
        return self._row_mask.sum() / self.global_rows

    def with_rows_in_place(self, tree: PyTree) -> Any:
        """Returns arrays of some rows of the batch on the devices that compute with them."""
        return tree

    def share_of_mean(self, total: jax.Array, divisor: jax.Array | int) -> jax.Array:
        """Returns this replica's share of a mean over the batch. The mean of all shares is the mean over the batch.

        Args:
          total: sum over this replica's rows, a scalar.
          divisor: divisor of this replica. Pass an int only if it is the number of its values.
        """
        # The number of values needs no exchange with other replicas.
        whole = divisor * self.num_replicas_in_sync if isinstance(divisor, int) else self.sum(divisor)
        return divide_sum(total * self.num_replicas_in_sync, whole)

    def share_of_sum(self, total: jax.Array) -> jax.Array:
        """Returns this replica's share of a sum over the batch. The mean of all shares is the sum over the batch."""
        return total * self.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree, options: Any = None) -> Any:
        """Returns the sum or the mean of `value`, a tree of arrays, over all replicas.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value: a tree of arrays with the same shapes on all replicas.
          options: a `trainer.distribute.CommunicationOptions`, for this reduction only.
        """
        ReduceOp.of(reduce_op)
        return value

    def sum(self, value: PyTree) -> Any:
        """Returns the sum of a tree of arrays over all replicas, for the step's own counts and statistics.

        It need not use the strategy's `cross_device_ops`, which are meant for gradients.
        """
        return self.all_reduce(ReduceOp.SUM, value)

    def all_gather(self, value: PyTree, axis: int = 0) -> Any:
        """Returns `value`, a tree of arrays, of all replicas, concatenated along `axis`."""
        return value

    def from_first_replica(self, value: PyTree) -> Any:
        """Returns the first replica's `value`, a tree of arrays."""
        is_first = self.replica_id_in_sync_group == 0
        return self.sum(jax.tree.map(lambda leaf: jnp.where(is_first, leaf, jnp.zeros_like(leaf)), value))

    def map_over_rows(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns the results of `function` for the rows of each replica, joined to the rows of the context.

        This context already has the rows of a single replica.

        Args:
          function: see `trainer.distribute.on_each_replica`.
          args: positional arguments, in which arrays with the context's rows are split.
          kwargs: keyword arguments, which each replica receives whole.
        """
        return function(*args, **kwargs)

    # --- the state of training: see `distribute/replica/replicated_state.py` ---------------------------------------

    def gather_params(self, state: Any) -> Any:
        """Returns a TrainState with whole parameters, for code inside the step."""
        return state

    def scatter_updates(self, before: Any, after: Any) -> Any:
        """Returns the form in which the state `after`, which a step made of `before`, leaves the replica."""
        return after

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        """Returns gradients reduced over the replicas, in the form for `update`.

        If `reduce_op` is None, they are already reduced.
        """
        return grads if reduce_op is None else self.all_reduce(reduce_op, grads)

    def reduce_loss(self, reduce_op: ReduceOp | str | None, loss: ArrayLike) -> jax.Array:
        """Returns the loss of the whole batch from this replica's part, reduced like gradients."""
        if reduce_op is None:
            return jnp.asarray(loss)
        share = 1.0 / self.num_replicas_in_sync if ReduceOp.of(reduce_op) is ReduceOp.MEAN else 1.0
        return self.sum(jnp.asarray(loss) * share)

    def reduce_loss_fn(
        self, reduce_op: ReduceOp | str | None, loss_fn: Callable[[PyTree], jax.Array]
    ) -> Callable[[PyTree], jax.Array]:
        """Returns the loss of the whole batch as a function of the parameters, with its gradients.

        Args:
          reduce_op: reduction of gradients over the replicas.
          loss_fn: returns this replica's part of the loss.
        """
        @jax.custom_vjp
        def whole(params: PyTree) -> jax.Array:
            return self.reduce_loss(reduce_op, loss_fn(params))

        def forward(params: PyTree) -> tuple[jax.Array, Any]:
            loss, grads = jax.value_and_grad(loss_fn)(params)
            return self.reduce_loss(reduce_op, loss), grads if reduce_op is None else self.all_reduce(reduce_op, grads)

        def backward(grads: PyTree, cotangent: jax.Array) -> tuple[Any]:
            return (jax.tree.map(lambda grad: (cotangent * grad).astype(grad.dtype), grads),)

        whole.defvjp(forward, backward)
        return whole

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns the parameters and the optimizer state after an update with reduced gradients.

        Args:
          rule: an `UpdateRule`, which applies gradients to parameters.
          grads: result of `reduce_gradients`.
          opt_state: optimizer state from `gather_params`.
          params: the parameters.
          extra: additional arguments for the optimizer: the loss of the whole batch, and functions of it.
        """
        return rule.update(grads, opt_state, params, extra)


def single_context(rows: int) -> ReplicaContext:
    """Returns the context of a single replica with all rows of a batch, without padding."""
    return ReplicaContext(rows)


def context_outside(inputs: PyTree) -> ReplicaContext:
    """Returns the context of a call outside of a step, with all rows of its inputs if they have any."""
    return single_context(next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(inputs) if jnp.ndim(leaf)), 1))


_outside = ReplicaContext()


def get_replica_context() -> ReplicaContext:
    """Returns the context of the replica being traced; outside of a step, a group of a single replica."""
    context: ReplicaContext | None = state.current().replica
    return _outside if context is None else context


def in_replica_context() -> bool:
    """Returns whether the caller runs inside a step."""
    return state.current().replica is not None


@contextlib.contextmanager
def enter(context: ReplicaContext) -> Iterator[ReplicaContext]:
    """Makes `context` the current context while a step is traced or run."""
    with state.replaced(replica=context):
        yield context
