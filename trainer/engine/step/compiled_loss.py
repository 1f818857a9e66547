"""The loss of a compiled model: the sum over its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer import losses
from trainer.core import arguments, errors
from trainer.core.replica_context import ReplicaContext, get_replica_context
from trainer.core.train_state import shapes_of
from trainer.core.types import PyTree
from trainer.engine.step.loss_terms import WeightedLossTerm, record
from trainer.engine.step.output_matching import match_arrays, match_choices, output_names, without_rows
from trainer.losses.base import BuiltinLoss, loss_of_batch, sum_of_real_rows, values_per_row
from trainer.losses.linear_logits import leaves_of, with_shapes
from trainer.metrics.registry import highest_label


class OutputLoss(NamedTuple):
    """The loss of an output.

    Attributes:
      name: the output's name; None for a single output.
      loss: its loss; None for an output without a loss.
      factor: its entry of `loss_weights`.
      highest_label: the largest label that the loss takes; None for any labels.
    """

    name: str | None
    loss: losses.Loss | None
    factor: float | None
    highest_label: int | None


class MissingTargetsError(ValueError):
    """A loss lacks targets. The caller says how to give them."""


class CompiledLoss:
    """The `loss` and `loss_weights` of `compile`, resolved at the first batch.

    Args:
      loss: a name, function or `Loss`; or a dict by output name, or a list, of these. None entries have no loss.
      loss_weights: factors of the single losses: a number, or a dict or list like `loss`.

    Raises:
      ValueError: for an unknown name, a reduction that gives no scalar, or `loss_weights` that do not match.
      TypeError: for a loss of a wrong type.

    Attributes:
      per_output: the loss of each output, after the first batch.
      label_limits: each loss that does not take all labels, after the index of its output, with the largest label.
      outputs: the shapes of the outputs of the first batch.
    """

    def __init__(self, loss: Any, loss_weights: Any = None):
        if loss_weights is not None and not isinstance(loss_weights, (int, float, list, tuple, Mapping)):
            raise errors.wrong_type("loss_weights", loss_weights, "a number, or a list or dict of numbers")
        for factor in jax.tree.leaves(loss_weights):
            # The likely cause is an argument in the wrong position.
            expected = "finite numbers (pass metrics by name: `metrics=[...]`)"
            arguments.require({"loss_weights": factor}, expected, math.isfinite)
            arguments.require_finite(loss_weights=factor)
        self._choices = jax.tree.map(_resolve, loss, is_leaf=lambda leaf: not isinstance(leaf, (Mapping, list, tuple)))
        self._weights = loss_weights
        if isinstance(loss_weights, (Mapping, list, tuple)) and isinstance(loss, (Mapping, list, tuple)) \
                and len(loss_weights) != len(loss):
            raise ValueError(f"`loss_weights` must match the number of losses, got {len(loss)} losses and "
                             f"{len(loss_weights)} weights.")
        self.per_output: list[OutputLoss] = []
        self.label_limits: list[tuple[int, losses.Loss, int]] = []
        self.outputs: Any = None

    @property
    def is_given(self) -> bool:
        """Whether there is any loss."""
        return bool(jax.tree.leaves(self._choices))

    @property
    def kinds(self) -> Any:
        """The kind of each loss and its weight, as plain data in the structure of the arguments."""
        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {str(name): plain(part) for name, part in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(part) for part in value]
            return value.kind if isinstance(value, losses.Loss) else None if value is None else float(value)

        return plain(self._choices) if self._weights is None else [plain(self._choices), plain(self._weights)]

    @property
    def wanted(self) -> list[bool]:
        """Whether each output has a loss, and so needs targets; empty before the first batch."""
        return [entry.loss is not None for entry in self.per_output]

    def is_of(self, outputs: PyTree) -> bool:
        """Returns whether the losses were matched to such outputs; an overridden `compute_loss` may select some."""
        structure: Any = jax.tree.structure(with_shapes(outputs))
        return bool(self.per_output) and structure == jax.tree.structure(self.outputs)

    @property
    def expects_probabilities(self) -> bool:
        """Whether the loss of any output expects probabilities; known after the first batch."""
        return any(entry.loss is not None and entry.loss.expects_probabilities for entry in self.per_output)

    @property
    def may_be_custom(self) -> bool:
        """Whether any given loss is the user's own."""
        return not all(map(_is_builtin, jax.tree.leaves(self._choices)))

    def why_of_batch(self) -> str | None:
        """Returns the reason, as a clause, why the loss may not be a mean over rows; None if it is."""
        for loss in jax.tree.leaves(self._choices):
            if loss.is_of_batch or not is_within_rows(getattr(loss, "axis", -1)):
                return f"the loss {loss.name!r} may be of the batch as a whole"
        return None

    def custom_values(self, y: PyTree, outputs: PyTree) -> list[jax.Array]:
        """Returns the values of the user's own losses for the outputs, before any reduction."""
        arrays, outputs = leaves_of(outputs), with_shapes(outputs)
        chosen = match_choices("loss", self._choices, outputs, lambda choices, number: True)
        targets = match_arrays("y", y, outputs, wanted=[loss is not None for loss in chosen])
        found = []
        for loss, target, output in zip(chosen, targets, arrays, strict=True):
            if loss is not None and not _is_builtin(loss):
                found.append(loss.values(target, output))
                if (kept := loss.mask(target, output)) is not None:
                    found.append(kept)
        return found

    def values(self, y: PyTree, outputs: PyTree, sample_weight: PyTree = None) -> dict[str | None, jax.Array]:
        """Returns each output's loss, not weighted by `loss_weights`, as a scalar by output name.

        If replicas or microbatches share a batch, it is the loss of this share: the mean over all shares is the loss of
        the batch.

        Raises:
          ValueError: if targets, weights and outputs do not match, an output with a loss has other rows than the batch,
            or there is no loss.
        """
        if not self.is_given:
            raise ValueError("No loss to compute. Give one to `compile(loss=...)`, or override `compute_loss`.")
        if y is None:
            raise MissingTargetsError("The loss needs targets, but `y` was not given.")
        arrays, outputs, rows = leaves_of(outputs), with_shapes(outputs), get_replica_context().rows
        if not arrays:
            raise ValueError(f"The loss received no outputs: `y_pred` is {errors.describe(outputs)}. End the call of "
                             "the module with `return`. A step of yours calls `compute_loss(x, y, y_pred, "
                             "sample_weight)`, or, for targets and outputs alone, `compute_loss(y=y, y_pred=y_pred)`.")
        if all(leaf.ndim == 0 for leaf in arrays):
            raise ValueError("The module returned a single number, such as a loss. It must return outputs, a row for "
                             "each row of `x`; `compile(loss=...)` takes the loss of labels and outputs.")
        if not self.per_output:
            self.per_output = self._matched(outputs)
            self.label_limits = [(index, entry.loss, entry.highest_label) for index, entry in enumerate(self.per_output)
                                 if entry.loss is not None and entry.highest_label is not None]
            self.outputs = shapes_of(outputs)
        targets = match_arrays("y", y, outputs, wanted=self.wanted)
        weights = match_arrays("sample_weight", sample_weight, outputs, may_repeat=True, wanted=self.wanted)
        values = {}
        for entry, target, output, weight in zip(self.per_output, targets, arrays, weights, strict=True):
            if entry.loss is None:
                continue
            if target is None:
                raise ValueError(f"Output {entry.name!r} has a loss, but `y` has no targets for it.")
            if rows is not None and output.shape[:1] not in ((), (rows,)):
                # A custom loss may broadcast it against the targets, so that it belongs to no row.
                raise without_rows(output, rows, "Reshape it to (rows, ...), or override `compute_loss`.")
            with errors.named_in_errors("loss", entry.loss.name, entry.name, target, output):
                values[entry.name] = _loss_of_output(entry, entry.loss, target, output, weight)
        return values

    def total(self, values: Mapping[str | None, jax.Array]) -> jax.Array:
        """Returns the weighted sum of the outputs' losses, by `loss_weights`."""
        factors = {entry.name: entry.factor for entry in self.per_output if entry.factor is not None}
        weighted = (value * factors[name] if name in factors else value for name, value in values.items())
        return sum(weighted, start=jnp.zeros((), jnp.float32))

    def _matched(self, outputs: PyTree) -> list[OutputLoss]:
        chosen = match_choices("loss", self._choices, outputs, lambda choices, number: True)
        factors = match_choices("loss_weights", self._weights, outputs, lambda choices, number: True)
        leaves = jax.tree.leaves(outputs)
        return [
            OutputLoss(name, loss, factor, loss and highest_label(loss, tuple(leaf.shape)))
            for name, loss, factor, leaf in zip(output_names(outputs), chosen, factors, leaves, strict=True)
        ]


def is_within_rows(axis: int | Sequence[int] | None) -> bool:
    """Returns whether the axes of a loss or a metric certainly exclude the axis of rows."""
    axes = axis if isinstance(axis, Sequence) else (axis,)
    return all(each is not None and (each > 0 or each == -1) for each in axes)


def _is_builtin(loss: losses.Loss) -> bool:
    return isinstance(loss, BuiltinLoss) and type(loss).__module__.startswith(losses.__name__)


def _resolve(choice: object) -> losses.Loss | None:
    if choice is None:
        return None
    loss = losses.as_loss(choice)
    if loss.reduction in (None, "none"):
        raise ValueError(f"The loss {loss.name!r} has reduction {loss.reduction!r}, which gives no scalar to minimise. "
                         "Use 'sum_over_batch_size', the default, or 'sum' or 'mean_with_sample_weight'.")
    return loss


def _warn_of_parts(loss: losses.Loss, context: ReplicaContext) -> None:
    if context.is_part:
        how, kind = ("summed", "sum") if loss.reduction == "sum" else ("averaged by their rows", "mean")
        warnings.warn(f"The loss {loss.name!r} returns one scalar. With `microbatches` it is computed for each of "
                      f"them, and {how}: that is the loss of the batch only if it is a {kind} over rows. "
                      "Return one value per row to be sure.", stacklevel=2)


def _loss_of_output(
    entry: OutputLoss, loss: losses.Loss, target: PyTree, output: PyTree, sample_weight: PyTree
) -> jax.Array:
    if loss.is_of_batch:
        return loss_of_batch(loss, target, output, sample_weight)
    context = get_replica_context()
    values, mask = loss.values(target, output), context.padding_mask
    if sample_weight is not None and context.rows is not None and values.shape[:1] != (context.rows,):
        raise ValueError(
            f"The loss {loss.name!r} returned values of shape {values.shape} for {context.rows} rows, which weights of "
            "rows cannot be matched to. Return one value per row: `jnp.mean(..., axis=-1)`, for example, in place of "
            "`jnp.mean(...)`. Or leave `sample_weight` and `class_weight` out.")
    if values.ndim == 0:
        if mask is None:
            _warn_of_parts(loss, context)
            return context.share_of_sum(values) if loss.reduction == "sum" else values
        values = values_per_row(loss.values, target, output)
    kept = loss.mask(target, output)
    total, divisor = sum_of_real_rows(values, loss.reduction, sample_weight, kept, mask)
    if divisor is None:
        return context.share_of_sum(total)
    # Also without weights: all batches of a phase must have the same logs.
    if kept is not None or loss.reduction == "mean_with_sample_weight":
        record(WeightedLossTerm(entry.name, 1.0 if entry.factor is None else entry.factor, total, jnp.asarray(divisor)))
    return context.share_of_mean(total, divisor)
