"""Which replica the code being traced runs in, and how it talks to the others.

Owns the current replica context and the names of the reductions. It must not name a collective: those that run
between devices live in `distribute/collectives.py`, behind the subclass that a compiled step enters.
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

#: What messages about padding advise.
MEAN_OVER_ROWS = (
    "take a mean over rows as `(values * context.row_mask).sum() * context.num_replicas_in_sync / context."
    "global_rows`, with `context = trainer.distribute.get_replica_context()`. Or choose a batch size that leaves no "
    "such batch.")


class ReduceOp(enum.Enum):
    """How values from several replicas are combined."""

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
    """Returns `total / divisor`: 0 where the divisor is 0, and `total` where it is None."""
    if divisor is None:
        return total
    divisor = jnp.asarray(divisor, total.dtype)
    return jnp.where(divisor == 0, 0, total / jnp.where(divisor == 0, 1, divisor))


class _Untold(str):
    """A string that is told from an equal one by its identity."""


#: How gradients are combined over replicas where a step does not say so.
MEAN_BY_DEFAULT = _Untold(ReduceOp.MEAN.value)


class ReplicaContext:
    """One replica's view of a step: its number, its rows and the reductions over all replicas.

    This base class is a group of one replica: every reduction returns its argument. It is the context of the steps of
    `fit`, `evaluate` and `predict`, which see the whole batch, and of code outside of any step.

    Attributes:
      num_replicas_in_sync: how many replicas run this step together.
      is_part: whether the rows are a microbatch, and not all that the replica has of the batch.
      batch_norm_groups: how many replicas' rows the batch has, each of which BatchNorm normalizes by itself with
        `batch_norm="per_replica"`.
      has_whole_batch: whether it is the only replica to code of a step that several devices divide.
      keys_differ: whether each replica has random keys of its own.
      mask_reads: how often code has asked which rows are padding, so that code which did not can be told.
      is_told_reduction: whether the last call of `apply_gradients` said how gradients are combined over the replicas.
      untold_reductions: how many calls did not.
    """

    num_replicas_in_sync: int = 1
    is_part = False
    batch_norm_groups: int = 1
    has_whole_batch: bool = False
    keys_differ: bool = True

    def __init__(self, rows: int | None = None, row_mask: jax.Array | None = None):
        self.rows = rows
        self.mask_reads = 0
        self.is_told_reduction = True
        self.untold_reductions = 0
        self._row_mask = row_mask

    @property
    def is_padded(self) -> bool:
        """Whether some rows, of any replica, pad the batch."""
        return self._row_mask is not None

    @property
    def padding_mask(self) -> jax.Array | None:
        """`row_mask`, or None in a batch without padding, where nothing has to be left out."""
        self.mask_reads += 1
        return self._row_mask

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """This replica's number, an int32 scalar in `[0, num_replicas_in_sync)`."""
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
        """How many real rows the batch has over all replicas: an int, or a float32 scalar in a padded batch."""
        if self._row_mask is not None:  # no read of the mask: a number alone leaves no row out
            return self.sum(self._row_mask.sum())
        if self.rows is None:
            raise RuntimeError("`global_rows` is only known inside a step.")
        return self.rows * self.num_replicas_in_sync

    @property
    def row_share(self) -> float | jax.Array:
        """This replica's share of the real rows of the batch, which adds up to 1 over all replicas."""
        if self._row_mask is None:
            return 1.0 / self.num_replicas_in_sync
        return self._row_mask.sum() / self.global_rows

    def with_rows_in_place(self, tree: PyTree) -> Any:
        """Returns arrays of some rows of the batch on the devices that compute with them."""
        return tree

    def share_of_mean(self, total: jax.Array, divisor: jax.Array | int) -> jax.Array:
        """Returns this replica's share of a mean over the batch: the mean of the shares is that of the batch.

        Args:
          total: the sum over this replica's rows, a scalar.
          divisor: what it is divided by, likewise of this replica: an int only if that is the number of its values.
        """
        # A number of values is known without asking the others.
        whole = divisor * self.num_replicas_in_sync if isinstance(divisor, int) else self.sum(divisor)
        return divide_sum(total * self.num_replicas_in_sync, whole)

    def share_of_sum(self, total: jax.Array) -> jax.Array:
        """Returns this replica's share of a sum over the batch, likewise, from the sum over its rows."""
        return total * self.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree, options: Any = None) -> Any:
        """Returns the sum or the mean of `value`, a tree of arrays, over all replicas.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value: a tree of arrays of the same shapes on all replicas.
          options: a `trainer.distribute.CommunicationOptions`, for this reduction only.
        """
        ReduceOp.of(reduce_op)
        return value

    def sum(self, value: PyTree) -> Any:
        """Returns the sum of a tree of arrays over all replicas: for the step's own counts and statistics.

        It need not be carried out by the strategy's `cross_device_ops`, which are made for gradients.
        """
        return self.all_reduce(ReduceOp.SUM, value)

    def all_gather(self, value: PyTree, axis: int = 0) -> Any:
        """Returns `value`, a tree of arrays, of all replicas concatenated along `axis`."""
        return value

    def from_first_replica(self, value: PyTree) -> Any:
        """Returns `value`, a tree of arrays, as the first replica has it."""
        is_first = self.replica_id_in_sync_group == 0
        return self.sum(jax.tree.map(lambda leaf: jnp.where(is_first, leaf, jnp.zeros_like(leaf)), value))

    def map_over_rows(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns what `function` returns for the rows of each replica, joined to those of the context.

        This context has the rows of one replica already.

        Args:
          function: see `trainer.distribute.on_each_replica`.
          args: its arguments, in which arrays with the context's rows are split.
          kwargs: its keyword arguments, which each replica gets whole.
        """
        return function(*args, **kwargs)

    # --- the state of training: see `distribute/replica/replicated_state.py` ---------------------------------------

    def gather_params(self, state: Any) -> Any:
        """Returns a TrainState as code inside the step sees it, its parameters whole."""
        return state

    def scatter_updates(self, before: Any, after: Any) -> Any:
        """Returns what leaves the replica for `after`, a state that a step made of `before`."""
        return after

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        """Returns gradients reduced over the replicas, in the form that `update` takes; None: they are already."""
        return grads if reduce_op is None else self.all_reduce(reduce_op, grads)

    def reduce_loss(self, reduce_op: ReduceOp | str | None, loss: ArrayLike) -> jax.Array:
        """Returns the loss of the whole batch from this replica's part of it, combined as gradients are."""
        if reduce_op is None:
            return jnp.asarray(loss)
        share = 1.0 / self.num_replicas_in_sync if ReduceOp.of(reduce_op) is ReduceOp.MEAN else 1.0
        return self.sum(jnp.asarray(loss) * share)

    def reduce_loss_fn(
        self, reduce_op: ReduceOp | str | None, loss_fn: Callable[[PyTree], jax.Array]
    ) -> Callable[[PyTree], jax.Array]:
        """Returns the function of parameters that is the loss of the whole batch, with its gradients.

        Args:
          reduce_op: how gradients are combined over the replicas.
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
        """Returns the parameters and the optimizer's state after an update with reduced gradients.

        Args:
          rule: an `UpdateRule`, how gradients change parameters.
          grads: what `reduce_gradients` returned.
          opt_state: the optimizer's state, as `gather_params` returned it.
          params: the parameters.
          extra: what the optimizer may ask for besides: the loss of the whole batch, and functions of it.
        """
        return rule.update(grads, opt_state, params, extra)


def single_context(rows: int) -> ReplicaContext:
    """Returns the context of a single replica, which has all rows of a batch: nothing pads it."""
    return ReplicaContext(rows)


def context_outside(inputs: PyTree) -> ReplicaContext:
    """Returns the context of a call outside of a step, which has all rows of its inputs, where these have any."""
    return single_context(next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(inputs) if jnp.ndim(leaf)), 1))


_outside = ReplicaContext()


def get_replica_context() -> ReplicaContext:
    """Returns the context of the replica that is being traced; outside of a step, a group of one replica."""
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
