"""The base class of losses, and the reduction of per-sample values to a scalar.

Owns dtypes, sample weights, masks and reductions, including batches that are split over replicas. Must not know any
particular loss.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments, replica_context
from trainer.core.errors import describe
from trainer.core.replica_context import ReplicaContext, divide_sum, get_replica_context
from trainer.core.types import ArrayLike
from trainer.losses.linear_logits import LinearLogits
from trainer.losses.shapes import (
    as_arguments,
    as_arrays,
    as_signed,
    check_arrays,
    check_same_shape,
    in_dtype,
    match_ranks,
)

#: Keras's epsilon: the bound of probabilities near 0 and 1, and the replacement of a divisor of 0.
EPSILON = 1e-7

_PACKAGE = __name__.partition(".")[0] + "."
_WORD_STARTS = r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])"

REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none", None)


def broadcast_sample_weight(values: jax.Array, sample_weight: ArrayLike | None) -> jax.Array:
    """Returns the sample weights, reshaped to broadcast against `values`.

    Removes a last axis of size 1 and adds missing last axes, so that `(n,)` and `(n, 1)` fit values of shape `(n,)`
    and `(n, t)`. Weights are not repeated: each axis has size 1 or the size of the axis of `values`, and a scalar
    stays a scalar. The sum of the result is therefore the sum of the given weights.

    Args:
      values: one loss value per sample, `(n, ...)`.
      sample_weight: an array or list of numbers: `()`, `(n,)`, `(n, 1)` or a shape that matches `values`.

    Returns:
      The weights, at least float32: `()`, or the rank of `values`.

    Raises:
      ValueError: if the shapes do not match.

    >>> broadcast_sample_weight(jnp.zeros((4, 3)), [1, 2, 3, 4]).shape
    (4, 1)
    """
    weights = in_dtype("`sample_weight`", sample_weight, jnp.promote_types(values.dtype, jnp.float32))
    if weights.ndim == 0:
        return weights
    shape = weights.shape
    if len(shape) == values.ndim + 1 and shape[-1] == 1:
        shape = shape[:-1]
    shape += (1,) * (values.ndim - len(shape))
    if len(shape) != values.ndim or any(size not in (1, full) for size, full in zip(shape, values.shape, strict=True)):
        fix = "Give one weight per row or per value." if values.ndim else "The loss must return one value per row."
        raise ValueError(f"`sample_weight` cannot be matched to the loss values. Received: sample_weight.shape="
                         f"{weights.shape}, values.shape={values.shape}. {fix}")
    return weights.reshape(shape)


def reduce_values(
    values: jax.Array, reduction: str | None, sample_weight: ArrayLike | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """Returns the weighted and reduced `values`.

    Args:
      values: one loss value per sample, `(n, ...)`. A scalar is weighted but not reduced.
      reduction: a member of `REDUCTIONS`; "none" and None keep the values unreduced. A mean divides by the number of
        values that the mask keeps, regardless of the weights; "mean_with_sample_weight" divides by the sum of the
        weights.
      sample_weight: see `broadcast_sample_weight`.
      mask: bool, of the shape of `values`; False excludes a value.

    Returns:
      A scalar of the dtype of `values`, or an array for "none" and None. A mean over nothing is 0.

    >>> float(reduce_values(jnp.array([1.0, 3.0]), "mean", sample_weight=[1, 2]))
    3.5
    """
    if reduction in ("none", None) or values.ndim == 0:
        weights = _weights(values, sample_weight, mask)
        return (values if weights is None else values * weights).astype(values.dtype)
    total, divisor = weighted_sum(values, reduction, sample_weight, mask)
    return divide_sum(total, divisor).astype(values.dtype)


def weighted_sum(
    values: jax.Array, reduction: str | None, sample_weight: ArrayLike | None = None, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | int | None]:
    """Returns the weighted sum of values and the divisor of a reduction, so that partial sums can be added first.

    Args:
      values: one loss value per sample, `(n, ...)`.
      reduction: see `reduce_values`; it must give a scalar.
      sample_weight: see `broadcast_sample_weight`.
      mask: see `reduce_values`.

    Returns:
      `(sum, divisor)`, in float32 or wider. The divisor is None for a sum, an int if it is the number of values, and
      a scalar array otherwise.
    """
    weights = _weights(values, sample_weight, mask)
    total = jnp.sum(values if weights is None else values * weights, dtype=jnp.promote_types(values.dtype, jnp.float32))
    if reduction == "sum":
        return total, None
    if reduction == "mean_with_sample_weight" and weights is not None:
        return total, weights.sum()
    return total, values.size if mask is None else mask.astype(jnp.float32).sum()


def sum_of_real_rows(
    values: jax.Array, reduction: str | None, sample_weight: ArrayLike | None, mask: jax.Array | None,
    row_mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array | int | None]:
    """Returns the `weighted_sum` of the rows that are not padding.

    Args:
      values: see `weighted_sum`.
      reduction: see `weighted_sum`.
      sample_weight: see `weighted_sum`.
      mask: see `weighted_sum`.
      row_mask: 1.0 for real rows and 0.0 for padding, `(n,)`; None if all rows are real.
    """
    if row_mask is not None:
        is_real = row_mask.reshape(-1, *[1] * (values.ndim - 1)) > 0
        if sample_weight is not None and reduction == "mean_with_sample_weight":
            # Not broadcast to the shape of the values: the sum of the weights must not change.
            sample_weight = broadcast_sample_weight(values, sample_weight) * is_real
        else:
            is_real = jnp.broadcast_to(is_real, values.shape)
            mask = is_real if mask is None else mask & is_real
    return weighted_sum(values, reduction, sample_weight, mask)


def _weights(values: jax.Array, sample_weight: ArrayLike | None, mask: jax.Array | None) -> jax.Array | None:
    weights = None if sample_weight is None else broadcast_sample_weight(values, sample_weight)
    if mask is None:
        return weights
    kept = mask.astype(jnp.float32)
    return kept if weights is None else weights * kept


class Loss:
    """The base class of losses. A subclass defines `call(y_true, y_pred)`.

    Args:
      name: the loss's name in logs; the class's name in snake case if None.
      reduction: the reduction of the per-sample values: "sum_over_batch_size" or "mean" (sum divided by the number of
        values), "sum", "mean_with_sample_weight" (sum divided by the sum of the weights), "none" or None.
      dtype: dtype of the result; float32 if None. Computations run in float32 or wider.

    Raises:
      ValueError: if `reduction` is unknown or `dtype` is not a float dtype.

    >>> class Distance(Loss):
    ...     def call(self, y_true, y_pred):
    ...         return jnp.abs(y_true - y_pred).max(axis=-1)
    >>> float(Distance()([[0, 0], [1, 1]], [[0, 2], [1, 1]]))
    1.0
    """

    #: Whether `y_true` holds class indices, which stay integers.
    sparse_labels: ClassVar[bool] = False
    #: The kinds of labels that `call` receives as floats. Other integers are cast to int32 or wider; the rest stays.
    float_labels: ClassVar[tuple[Any, ...]] = (jnp.inexact, jnp.bool_)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(_PACKAGE) and "__init__" in vars(cls):
            cls.__init__ = arguments.checked(vars(cls)["__init__"])  # type: ignore[method-assign]

    @arguments.checked
    def __init__(
        self, name: str | None = None, reduction: str | None = "sum_over_batch_size", dtype: DTypeLike | None = None
    ):
        if reduction not in REDUCTIONS:
            raise ValueError(f"Invalid value for argument `reduction`. Expected one of {REDUCTIONS}. "
                             f"Received: reduction={reduction!r}.")
        if dtype is not None and not jnp.issubdtype(arguments.as_dtype("dtype", dtype), jnp.floating):
            raise ValueError(f"Invalid value for argument `dtype`. Expected a float dtype such as \"float32\". "
                             f"Received: dtype={dtype!r}.")
        self.name = name or re.sub(_WORD_STARTS, "_", type(self).__name__).lower()
        self.reduction = reduction
        self._dtype = None if dtype is None else jnp.dtype(dtype).name

    @property
    def dtype(self) -> str:
        """The name of the result's dtype."""
        return self._dtype or "float32"

    @property
    def kind(self) -> str:
        """The class's name and its arguments that differ from the defaults; the same text in every process.

        >>> from trainer import losses
        >>> losses.BinaryCrossentropy(from_logits=True).kind, losses.as_loss("mse").kind
        ('BinaryCrossentropy(from_logits=True)', 'MeanSquaredError()')
        """
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        differing = [f"{name}={value!r}" for name, value in self.get_config().items()
                     if name != "name" and isinstance(value, (bool, int, float, str)) and value != defaults.get(name)]
        return f"{type(self).__name__}({', '.join(differing)})"

    def __repr__(self) -> str:
        return self.kind

    @property
    def expects_probabilities(self) -> bool:
        """Whether `y_pred` must be probabilities. With logits, training would silently fail."""
        return False

    @property
    def takes_linear_logits(self) -> bool:
        """Whether `call` takes `LinearLogits`; otherwise it receives all logits."""
        return False

    @property
    def is_of_batch(self) -> bool:
        """Whether the loss is computed over the whole batch, and is not a mean over rows."""
        return False

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Returns one value per sample, rows first. Subclasses must override this method.

        Args:
          y_true: labels. Integers are int32 or wider, other labels floats.
          y_pred: predictions, as floats.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `call(self, y_true, y_pred)`.")

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        """Raises an error for invalid shapes or dtypes. Subclasses may override this method.

        Args:
          y_true: labels, or a tree of labels: anything with `shape` and `dtype`.
          y_pred: predictions, likewise.
        """

    def mask(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array | None:
        """Returns a bool array of the shape of `values`, False for excluded values; None if all values count."""
        return None

    def values(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Returns the unreduced and unweighted loss.

        Args:
          y_true: labels of any dtype: an array, a list of numbers, or a tree of arrays.
          y_pred: predictions, likewise.

        Returns:
          One value per sample, rows first, `(n, ...)`, of dtype `self.dtype`.

        Raises:
          ValueError: if `validate` rejects the shapes or dtypes.
          TypeError: if complex numbers would be cast to real numbers.
        """
        compute_dtype = jnp.promote_types(self.dtype, jnp.float32)
        kinds = () if self.sparse_labels else self.float_labels
        y_true = jax.tree.map(
            lambda leaf: in_dtype("`y_true`", leaf, compute_dtype)
            if any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds) else as_signed(leaf), as_arrays(y_true))
        y_pred = self._predictions(y_pred, compute_dtype)
        self.validate(y_true, y_pred)
        return in_dtype(f"The values of the loss {self.name!r}", self.call(y_true, y_pred), self.dtype)

    def _predictions(self, y_pred: Any, dtype: DTypeLike | None = None) -> Any:
        takes_as_it_is = isinstance(y_pred, LinearLogits) and self.takes_linear_logits
        return y_pred if takes_as_it_is else as_arrays(y_pred, dtype, "`y_pred`")

    def __call__(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> jax.Array:
        """Returns the reduced loss: a scalar, or one value per sample for the reduction "none".

        In `strategy.run`, the loss excludes rows that pad the batch, also if the arguments hold the replica's rows
        several times (for example, real and generated rows in one array). A mean is then this replica's share: the
        mean of the shares over all replicas is the loss of the whole batch.

        Args:
          y_true: see `values`.
          y_pred: see `values`.
          sample_weight: a scalar, or one weight per row or per value.

        Raises:
          ValueError: if the shapes do not match.
        """
        labels, predictions = as_arrays(y_true), self._predictions(y_pred)
        if self.is_of_batch:
            return loss_of_batch(self, labels, predictions, sample_weight)
        values, mask = self.values(labels, predictions), self.mask(labels, predictions)
        context = get_replica_context()
        of_rows = context.rows and values.ndim and values.shape[0] % context.rows == 0  # None outside a step
        if self.reduction in ("none", None) or not of_rows:
            return reduce_values(values, self.reduction, sample_weight, mask)
        row_mask = context.padding_mask
        if row_mask is not None:
            row_mask = jnp.tile(row_mask, values.shape[0] // row_mask.size)
        total, divisor = sum_of_real_rows(values, self.reduction, sample_weight, mask, row_mask)
        return (total if divisor is None else context.share_of_mean(total, divisor)).astype(values.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments; `dtype` only if it was given."""
        config = {"name": self.name, "reduction": self.reduction}
        return config if self._dtype is None else {**config, "dtype": self._dtype}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a loss from the result of `get_config`."""
        return cls(**config)


def loss_of_batch(
    loss: Loss, y_true: jax.Array, y_pred: jax.Array, sample_weight: ArrayLike | None = None
) -> jax.Array:
    """Returns the reduced loss over the rows of all replicas, equal on every replica.

    Args:
      loss: a loss of the whole batch.
      y_true: labels of this replica's rows.
      y_pred: predictions, likewise.
      sample_weight: a scalar, or one weight per value of this replica's rows.
    """
    context = get_replica_context()
    rows, replicas, mask = context.rows, context.num_replicas_in_sync, context.padding_mask
    if context.is_part:
        raise ValueError(f"The loss {loss.name!r} is of a batch as a whole, which `microbatches` computes in parts. "
                         "Compile without `microbatches`.")
    if replicas > 1:
        y_true, y_pred, sample_weight, mask = jax.tree.map(
            lambda leaf: context.all_gather(leaf) if jnp.shape(leaf)[:1] == (rows,) else leaf,
            (y_true, y_pred, sample_weight, mask))
    with replica_context.enter(ReplicaContext(None if rows is None else rows * replicas, mask)):
        values = loss.values(y_true, y_pred)
        return reduce_values(values, loss.reduction, sample_weight, loss.mask(y_true, y_pred))


def values_per_row(function: Callable[..., Any], y_true: ArrayLike, y_pred: ArrayLike, **arguments: Any) -> jax.Array:
    """Returns a function's values, rows first.

    A function that returns a scalar, the mean over the rows, is mapped over the rows as batches of size 1, so that
    rows can be excluded.

    Args:
      function: a function of `(y_true, y_pred, **arguments)`.
      y_true: labels, rows first; an array or a tree of arrays.
      y_pred: predictions, likewise.
    """
    values = in_dtype("The values of a loss or a metric", function(y_true, y_pred, **arguments), None)
    if values.ndim:
        return values

    def of_one_row(*row: Any) -> jax.Array:
        return jnp.asarray(function(*jax.tree.map(lambda leaf: leaf[None], row), **arguments))

    return jax.vmap(of_one_row)(y_true, y_pred)


class FunctionLoss(Loss):
    """A user's function `(y_true, y_pred) -> values` as a `Loss`.

    The function receives predictions as floats. Integer labels stay integers, for losses of class indices such as
    optax's, but are cast to int32, because uint8 arithmetic wraps around. Bools stay bools. The ranks of single arrays
    are matched as in Keras.

    Args:
      function: returns one value per sample, rows first, or a scalar.
      reduction: see `Loss`.
      name: the function's own name if None.
      dtype: see `Loss`.
    """

    float_labels = ()

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(name or getattr(function, "__name__", type(function).__name__), reduction, dtype)
        self.function = function

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        values = self.function(*as_arguments(y_true, y_pred))
        is_in_step = get_replica_context().rows is not None
        if is_in_step and hasattr(values, "dtype") and not jnp.issubdtype(values.dtype, jnp.inexact):
            raise TypeError(f"A loss must have floats: nothing is learned from numbers without a gradient. Received: "
                            f"{describe(values)} of the loss {self.name!r}. Compare floats, or use it as a metric.")
        return values

    @property
    def kind(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def get_config(self) -> dict[str, Any]:
        return {"function": self.function, **super().get_config()}


class BuiltinLoss(Loss):
    """A loss of this package: a class around a function, with the function's name and arguments.

    Args:
      reduction: see `Loss`.
      name: the function's name if None.
      dtype: see `Loss`.
    """

    #: The same loss as a function of `(y_true, y_pred)` and `parameters`.
    function: ClassVar[Callable[..., jax.Array]]
    #: The names of the function's further arguments; the loss has attributes of these names.
    parameters: ClassVar[tuple[str, ...]] = ()
    #: Short names of the function.
    aliases: ClassVar[tuple[str, ...]] = ()
    float_labels: ClassVar[tuple[Any, ...]] = (jnp.number, jnp.bool_)
    #: Whether the features of a row form one vector, such as a distribution, rather than independent numbers.
    needs_vectors: ClassVar[bool] = False

    def __init__(
        self, reduction: str | None = "sum_over_batch_size", name: str | None = None, dtype: DTypeLike | None = None
    ):
        super().__init__(name or self.function.__name__, reduction, dtype)

    @property
    def arguments(self) -> dict[str, Any]:
        """The function's further arguments."""
        return {parameter: getattr(self, parameter) for parameter in self.parameters}

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_arrays(y_true, y_pred)
        check_same_shape(y_true, y_pred, "Give one label for each number of `y_pred`, or the last layer one unit for "
                                         "each label. For labels that are class indices use "
                                         "SparseCategoricalCrossentropy.")
        self.check_rank(y_pred)

    def check_rank(self, y_pred: jax.Array) -> None:
        """Raises ValueError if the predictions lack the axis of rows, or an axis of features that the loss needs."""
        expected = "(batch, ..., features)" if self.needs_vectors else "(batch, ...)"
        if len(y_pred.shape) < 1 + self.needs_vectors:
            raise ValueError(f"`y_pred` must have shape {expected} for the loss {self.name!r}. "
                             f"Received: y_pred.shape={tuple(y_pred.shape)}. Add the missing axis.")

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        y_true, y_pred = match_ranks(y_true, y_pred)
        if y_pred.ndim == 1:
            # One number per row: add an axis of features, or the function would average over the rows.
            y_true, y_pred = y_true[:, None], y_pred[:, None]
        return self.function(y_true, y_pred, **self.arguments)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}
