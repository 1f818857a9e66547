"""Checks of a run before its first step compiles: labels that fit the loss, probabilities where a loss expects them.

Also of arguments that several methods take.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from trainer import errors
from trainer.compiled_loss import CompiledLoss
from trainer.data import Source
from trainer.losses.base import FunctionLoss, values_per_row
from trainer.outputs import match_arrays


def check_labels(compiled_loss: CompiledLoss, y: Any) -> None:
    """Raises ValueError if an integer label lies outside of the classes that the model has outputs for.

    Args:
      compiled_loss: the losses, matched to the model's outputs.
      y: the targets on the host; further leading axes do not matter.
    """
    if y is None or not any(loss is not None and loss.sparse_labels for _, loss, _, _ in compiled_loss.per_output):
        return
    targets = match_arrays("y", y, compiled_loss.outputs)
    for (_, loss, _, shape), labels in zip(compiled_loss.per_output, targets, strict=True):
        if loss is None or not loss.sparse_labels or labels is None:
            continue
        classes = shape[getattr(loss, "axis", -1)]
        ignored = getattr(loss, "ignore_class", None)
        if ignored is not None:
            labels = labels[labels != ignored]
        low, high = (labels.min(), labels.max()) if labels.size else (0, 0)
        if low < 0 or high >= classes:
            raise ValueError(
                f"`y` has the label {int(low if low < 0 else high)}, but the model has {classes} outputs per row, for "
                f"the labels 0 to {classes - 1} of {loss.name!r}. Make the last layer larger, number the labels from "
                "0, or give `ignore_class`.")


def check_probabilities(compiled_loss: CompiledLoss, outputs: Any) -> None:
    """Raises ValueError if outputs that a loss takes for probabilities lie outside of [0, 1].

    Args:
      compiled_loss: the losses, matched to the model's outputs.
      outputs: the model's outputs for some rows.
    """
    for (_, loss, _, _), output in zip(compiled_loss.per_output, jax.tree.leaves(outputs), strict=True):
        if loss is None or not loss.expects_probabilities:
            continue
        values = np.asarray(output, np.float32)
        if (values < -1e-3).any() or (values > 1 + 1e-3).any():
            raise ValueError(
                f"The loss {loss.name!r} expects probabilities, but the model's outputs (shape {values.shape}) go from "
                f"{values.min():.3g} to {values.max():.3g}: they look like logits. Use the loss with from_logits=True, "
                "or end the model with a softmax or sigmoid.")


def check_means_over_rows(compiled_loss: CompiledLoss, y: Any, outputs: Any) -> None:
    """Raises ValueError for a user's loss that returns one scalar which is not the mean over the rows.

    The rows of a batch that is split over replicas cannot be given to such a function together.

    Args:
      compiled_loss: the losses, matched to the model's outputs.
      y: targets of some rows.
      outputs: the model's outputs for these rows.
    """
    targets = match_arrays("y", y, compiled_loss.outputs)
    for (_, loss, _, _), target, output in zip(
            compiled_loss.per_output, targets, jax.tree.leaves(outputs), strict=True):
        if not isinstance(loss, FunctionLoss):
            continue
        value, per_row = loss.values(target, output), values_per_row(loss.values, target, output)
        if value.ndim == 0 and not np.allclose(value, per_row.mean(), rtol=1e-3, atol=1e-5, equal_nan=True):
            raise ValueError(
                f"The loss {loss.name!r} returned one scalar, {float(value):.4g}, for {len(per_row)} rows whose mean "
                f"is {float(per_row.mean()):.4g}. Each of several replicas sees its own rows only, so there a loss "
                "must return one value per row, or their mean. Use one device for a loss of the batch as a whole.")


def check_count(argument: str, value: Any, minimum: int, optional: bool = False) -> None:
    """Raises an error unless `value` is a whole number of at least `minimum`, or None if it is `optional`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise errors.wrong_type(argument, value, "a whole number" + (" or None" if optional else ""))
    if value < minimum:
        raise ValueError(f"`{argument}` must be at least {minimum}. Received: {value}.")


def check_validation_freq(value: Any) -> None:
    """Raises an error unless `value` is a positive whole number or a collection of these."""
    for number in value if isinstance(value, Collection) and not isinstance(value, str) else [value]:
        check_count("validation_freq", number, 1)


def check_verbose(value: Any) -> int:
    """Returns `verbose` as a number: "auto" is 1.

    Raises:
      ValueError: if it is none of 0, 1, 2 and "auto".
    """
    if value == "auto":
        return 1
    if value not in (0, 1, 2):
        raise ValueError(f"`verbose` must be 0, 1, 2 or 'auto'. Received: {value!r}.")
    return int(value)


def check_holds_steps(source: Source, argument: str, steps: int | None) -> None:
    """Raises ValueError if data that are read once have fewer batches than `steps`, given as an argument of this name.

    Beyond its end a source begins anew, which for `fit` is another pass, but otherwise would count rows twice.
    """
    if steps is not None and source.num_batches is not None and steps > source.num_batches:
        raise ValueError(f"`{argument}` must be at most the number of batches. Received: {argument}={steps}, for data "
                         f"of {source.num_batches} batches. Leave it out to take them all.")
