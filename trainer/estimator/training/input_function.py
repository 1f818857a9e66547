"""Conversion of an `input_fn`'s data to the batches of a run.

Owns the rule that an `input_fn` returns the batch of one replica: a step of N replicas concatenates N batches to a
global batch. Does not depend on models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from trainer.core import errors
from trainer.core.types import PyTree
from trainer.data import Dataset, RowDataset
from trainer.estimator.training.spec import BatchMap


class InputBatches:
    """The batches of an `input_fn` call, with a known first batch.

    Args:
      data: result of the `input_fn`: a batched `trainer.data.Dataset` or `RowDataset`, another iterable or indexed
        object of batches `features` or `(features, labels)`, or arrays `(features, labels)`, which repeat as the same
        batch forever. Arrays may be a table's columns, such as pandas' series, and features a table, such as its data
        frames: the columns by name. Text arrays require a `batch_map` that converts them to numbers.

    Attributes:
      features: features of the first batch.
      labels: labels of the first batch; None without labels.

    Raises:
      TypeError: if the data are not batches.
      ValueError: if the data are empty, or a dataset is not batched.
    """

    def __init__(self, data: Any):
        if isinstance(data, tuple) and data and _is_batch(data[0]) and any(isinstance(part, list) for part in data):
            _refuse_lists(data)
        self._data: Any = _Forever(data) if _is_batch(data) else data
        has_batches = any(hasattr(self._data, name) for name in ("__iter__", "__getitem__"))
        if not has_batches or (isinstance(self._data, str | bytes | dict) and self._data):
            raise errors.wrong_type("the result of input_fn", data, "a `trainer.data.Dataset` of batches, another "
                                    "iterable of batches `(features, labels)`, or arrays `(features, labels)`")
        if isinstance(self._data, Dataset | RowDataset) and self._data.batch_size is None:
            raise ValueError("input_fn returned a dataset of rows. Call its `batch(batch_size)`, with the batch of one "
                             "replica.")
        is_one_shot = hasattr(self._data, "__next__")
        iterator = iter(self._data) if hasattr(self._data, "__iter__") else iter([self._data[0]])
        try:
            first = next(iterator)
        except StopIteration:
            raise ValueError("input_fn returned data without a batch.") from None
        if is_one_shot:
            self._data = itertools.chain([first], iterator)
        elif hasattr(iterator, "close"):
            iterator.close()
        self._has_tables = _is_table(first[0] if isinstance(first, tuple) and first else first)
        self.features, self.labels = _features_and_labels(first)

    def per_step(self, replicas: int, batch_map: BatchMap | None, limit: int | None = None) -> Any:
        """Returns data for `Model.fit` or `evaluate`, with one global batch per step.

        Args:
          replicas: number of batches to concatenate per step.
          batch_map: function to apply to each batch of `input_fn`.
          limit: maximum number of steps; None for all.
        """
        data = self._data
        is_taken_whole = isinstance(data, Dataset) or (limit is None and not isinstance(data, list | tuple))
        if batch_map is None and replicas == 1 and is_taken_whole and not self._has_tables:
            return data if limit is None else data.take(limit)

        def step(batches: list[Any]) -> Any:
            pairs = [_features_and_labels(batch) for batch in batches]
            return _concatenated([mapped_batch(batch_map, *pair) for pair in pairs])

        if hasattr(data, "__next__"):
            return _in_steps(data, replicas, step, limit)
        if isinstance(data, Dataset):
            return _IndexedSteps(_BatchesOfDataset(data), replicas, step, limit)
        if hasattr(data, "__getitem__") and not isinstance(data, RowDataset):
            return _IndexedSteps(data, replicas, step, limit)
        return _Steps(data, replicas, step, limit)


def mapped_batch(batch_map: BatchMap | None, features: PyTree, labels: PyTree) -> Any:
    """Returns the result of `batch_map` for a batch, or the batch itself without a `batch_map`.

    Raises:
      TypeError: if the result is not a tuple of one to three elements.
    """
    if batch_map is None:
        return features, labels
    batch = batch_map(features, labels)
    if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
        raise TypeError("`batch_map` must return `(x,)`, `(x, y)` or `(x, y, sample_weight)`. Received: "
                        f"{errors.describe(batch)}.")
    return batch


class _Forever:
    """An endless repetition of a batch."""

    num_batches = None  # endless, as in Keras

    def __init__(self, batch: PyTree):
        self._batch = batch

    def __getitem__(self, index: int) -> Any:
        return self._batch


class _BatchesOfDataset:
    """The batches of a dataset's first pass by index; sequential access costs nothing extra."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self.num_batches = None if dataset.cardinality == math.inf else int(dataset.cardinality)
        self._reading: Iterator[Any] = iter(())
        self._next = -1

    def __getitem__(self, index: int) -> Any:
        if index != self._next:
            self._reading = self._dataset.read(0, index)
        self._next = index + 1
        return next(self._reading)


class _IndexedSteps:
    """Steps by index, each of several batches."""

    def __init__(self, batches: Any, count: int, step: Callable[[list[Any]], Any], limit: int | None):
        self._batches, self._count, self._step = batches, count, step
        self._length: int | None = batches.num_batches if hasattr(batches, "num_batches") else len(batches)
        of_data = None if self._length is None else -(-self._length // count)
        self._steps = min((most for most in (of_data, limit) if most is not None), default=None)

    @property
    def num_batches(self) -> int | None:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        first, last = index * self._count, (index + 1) * self._count
        last = last if self._length is None else min(last, self._length)
        return self._step([self._batches[number] for number in range(first, last)])


class _Steps:
    """Steps of an iterable, which restarts on each iteration."""

    def __init__(self, batches: Iterable[Any], count: int, step: Callable[[list[Any]], Any], limit: int | None):
        self._batches, self._count, self._step, self._limit = batches, count, step, limit

    def __iter__(self) -> Iterator[Any]:
        return _in_steps(iter(self._batches), self._count, self._step, self._limit)


def _in_steps(batches: Iterator[Any], count: int, step: Callable[[list[Any]], Any],
              limit: int | None) -> Iterator[Any]:
    try:
        for _ in itertools.repeat(None) if limit is None else range(limit):
            group = list(itertools.islice(batches, count))
            if not group:
                return
            yield step(group)
    finally:
        if hasattr(batches, "close"):
            batches.close()


def _is_batch(data: object) -> bool:
    """Returns whether data are a single batch: an array or a table, or a tuple or dict of arrays."""
    if hasattr(data, "__array__"):
        return True
    if isinstance(data, dict):
        return bool(data) and all(map(_is_batch, data.values()))
    return isinstance(data, tuple) and bool(data) and all(part is None or _is_batch(part) for part in data)


def _features_and_labels(batch: PyTree) -> tuple[Any, Any]:
    if isinstance(batch, list | str | bytes):
        _refuse_lists(batch)
    if not isinstance(batch, tuple):
        return _by_column(batch), None
    if len(batch) > 2:
        raise ValueError("The batches of input_fn must be `features` or `(features, labels)`. Received: a tuple of "
                         f"{len(batch)}. Weights of rows are a feature that `weight_column` names, or come from a "
                         "`batch_map` of the spec.")
    return _by_column(batch[0]), batch[1] if len(batch) == 2 else None


def _refuse_lists(batch: PyTree) -> NoReturn:
    raise TypeError("The batches of input_fn must be arrays: `features` or a tuple `(features, labels)`. Received: "
                    f"{errors.describe(batch)}. Make arrays of lists, by `np.asarray`.")


def _is_table(features: object) -> bool:
    return hasattr(features, "__array__") and hasattr(features, "columns")


def _by_column(features: Any) -> Any:
    """Returns the columns of a table by name; other features unchanged."""
    return {name: features[name] for name in features.columns} if _is_table(features) else features


def _concatenated(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    try:
        return jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *batches)
    except ValueError as error:
        raise ValueError("The batches of a step's replicas cannot be joined: all must have the same features and "
                         f"shapes, rows first. {error}") from error
