"""The choice of a source for a user's `x`, `y` and `sample_weight`, and the split for validation.

Owns the recognition of types, by their methods and without importing their libraries.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
import types
from typing import Any

import jax
import numpy as np

from trainer.core import arguments
from trainer.core.arguments import as_count
from trainer.core.errors import describe
from trainer.core.types import ArrayTree, Count, PyTree
from trainer.data.buckets import BucketedDataset, BucketSource
from trainer.data.files.row_dataset import RowDataset
from trainer.data.files.row_source import RowSource
from trainer.data.parallel_items import ParallelSource
from trainer.data.sharding.auto_shard import AutoShardPolicy, DataWithOptions
from trainer.data.sharding.grain_shards import shard_grain
from trainer.data.sharding.joined import JoinedSource
from trainer.data.sharding.processes import Processes
from trainer.data.sources.arrays import (
    DataError,
    HostArrays,
    is_array_tree,
    is_leaf,
    is_list_of_batches,
    pack_x_y_sample_weight,
)
from trainer.data.sources.class_weight import ClassWeights
from trainer.data.sources.columns import ColumnBatches, ColumnSource
from trainer.data.sources.dataset import Dataset, DatasetSource
from trainer.data.sources.py_dataset import PyDataset
from trainer.data.sources.sources import IndexedSource, IterableSource, SampleSource, Source, WeightedSource

DEFAULT_BATCH_SIZE = 32
_VALIDATION = "Data to validate on are given by name: `fit(train, validation_data=val)`."


def adapt(
    x: Any,
    y: ArrayTree | None = None,
    sample_weight: ArrayTree | None = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    seed: int = 0,
    class_weight: dict[int, float] | None = None,
    steps: int | None = None,
    processes: Processes | None = None,
) -> Source:
    """Returns the source of batches for the data of `fit`, `evaluate` or `predict`.

    Args:
      x: arrays (one, or a tree of arrays, with equal first dimensions); or a list of batches; or an iterable of batches
        `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`: a batched `Dataset`, a generator, any re-iterable (Grain,
        `tf.data`, a torch `DataLoader`), or an object with `__getitem__` and a length, such as a
        `keras.utils.PyDataset`; or the result of `with_options` for any of these; or the `HostArrays` of
        `(x, y, sample_weight)`, as `split_validation` returns.
      y: targets, if `x` is arrays: an array or a tree of arrays with the same number of rows.
      sample_weight: row weights, if `x` is arrays, with the same number of rows.
      batch_size: rows per batch, if `x` is arrays; by default the size that gives `steps` batches, or 32.
      shuffle: True draws the rows of arrays, or the batches of an indexed object, in a new order in each pass; "batch"
        keeps the rows of a batch together. Other data keep their own order.
      seed: seed of the order.
      class_weight: a dict from integer label to the weight of the rows with that label in `y`.
      steps: number of batches of arrays per epoch, if known.
      processes: the processes of the strategy, which read the data; by default only this process.

    Raises:
      ValueError: for unusable data, or for arguments that contradict each other.

    Example:
      >>> source = adapt(np.zeros((10, 4)), np.zeros(10), batch_size=4)
      >>> [x.shape for x, y in source.read(0)]
      [(4, 4), (4, 4), (2, 4)]

    Source: the arguments follow `keras.Model.fit`.
    """
    arrays = x if isinstance(x, HostArrays) else None
    if arrays is not None:
        x, y, sample_weight = arrays.tree
    if class_weight is not None and sample_weight is not None:
        raise ValueError("`class_weight` and `sample_weight` cannot be used together. "
                         "Multiply the class weights into `sample_weight`.")
    if not isinstance(shuffle, (bool, np.bool_)) and shuffle != "batch":
        raise ValueError(f'`shuffle` must be True, False or "batch". Received: {describe(shuffle)}.')
    class_weights = None if class_weight is None else ClassWeights(class_weight)
    if arrays is None and not (y is None and is_list_of_batches(x)) and is_array_tree(x):
        arrays = _as_host_arrays(x, y, sample_weight)
    if arrays is not None:
        return _adapt_arrays(arrays, batch_size, shuffle, seed, class_weights, steps)
    x, policy = (x.data, x.auto_shard_policy) if isinstance(x, DataWithOptions) else (x, AutoShardPolicy.AUTO)
    source = _adapt_batches(x, bool(shuffle), seed, policy, processes or Processes())
    _check_alone(x, y=y, sample_weight=sample_weight, batch_size=batch_size)
    if class_weights is None:
        return source
    if isinstance(source, SampleSource):
        raise ValueError("`class_weight` cannot be used with data that workers read. Give their batches sample "
                         "weights.")
    return WeightedSource(source, class_weights)


def _as_host_arrays(x: Any, y: Any, sample_weight: Any) -> HostArrays:
    """Returns arrays as the rows of a data set; raises for lists of arrays that are other data."""
    if isinstance(x, list) and x and y is None and all(isinstance(row, dict) for row in x):
        raise _rows_of_columns(x)
    if isinstance(x, list) and is_list_of_batches(x) and is_list_of_batches(y):  # also if all rows are equal
        raise _no_targets(x, y)
    try:
        return HostArrays.of((x, y, sample_weight))
    except DataError:
        if is_list_of_batches(x) or is_list_of_batches(y) or _is_data_set(y):
            raise _no_targets(x, y) from None
        raise


def _check_alone(x: Any, **others: Any) -> None:
    """Raises ValueError if other arguments are given beside batches, which have their own targets and rows."""
    for name, value in others.items():
        if value is not None:
            rows = (" If its elements are rows, give a `torch.utils.data.DataLoader` of it, or arrays."
                    if name == "batch_size" and hasattr(x, "__getitem__") else "")
            validation = f" {_VALIDATION}" if name == "y" else ""
            raise ValueError(f"When providing `x` as a {_kind(x)}, `{name}` should not be passed: "
                             f"batches are taken as the {_kind(x)} yields them. Received: "
                             f"{name}={value if isinstance(value, int) else describe(value)}.{rows}{validation}")


def _no_targets(x: Any, y: Any) -> ValueError:
    shown = ", ".join(f"{name}={len(value)} batches like {describe(value[0])}" if is_list_of_batches(value)
                      else f"{name}={describe(value)}" for name, value in (("x", x), ("y", y)))
    return ValueError("`y` must be arrays with the rows of `x`, and no batches or data set. Received: "
                      f"{shown}. {_VALIDATION}")


def _is_data_set(y: Any) -> bool:
    is_collection = hasattr(y, "__iter__") or hasattr(y, "__getitem__")
    return is_collection and not isinstance(y, (str, bytes, dict)) and not hasattr(y, "tocsr") and not is_array_tree(y)


def _adapt_arrays(
    arrays: HostArrays,
    batch_size: int | None,
    shuffle: bool | str,
    seed: int,
    class_weights: ClassWeights | None,
    steps: int | None,
) -> Source:
    if batch_size is None:
        batch_size = math.ceil(arrays.rows / as_count("steps", steps)) if steps is not None else DEFAULT_BATCH_SIZE
    x, y, sample_weight = arrays.tree
    if class_weights is not None:
        sample_weight = class_weights(y)
        class_weights.warn_of_unseen()
    dataset = Dataset.from_host_arrays(HostArrays(pack_x_y_sample_weight(x, y, sample_weight)))
    if shuffle == "batch":
        return DatasetSource(dataset.batch(batch_size).shuffle(seed))
    return DatasetSource((dataset.shuffle(seed) if shuffle else dataset).batch(batch_size))


def _adapt_batches(x: Any, shuffle: bool, seed: int, policy: AutoShardPolicy, processes: Processes) -> Source:
    if policy is AutoShardPolicy.OFF and processes.count > 1:
        return JoinedSource(_adapt_batches(x, shuffle, seed, AutoShardPolicy.DATA, processes), processes)
    if isinstance(x, SampleSource):
        return x
    if isinstance(x, Dataset):
        x.require_batched()
        if not x.is_mapped:  # else `map` may make numbers of text
            x.arrays.require_numbers()
        return DatasetSource(x)
    if isinstance(x, RowDataset):
        return RowSource(x, processes if policy is AutoShardPolicy.AUTO else None)
    if isinstance(x, BucketedDataset):
        return BucketSource(x)
    if isinstance(x, ColumnBatches):
        return ColumnSource(x, _iterable_length(x.batches))
    if hasattr(x, "column_names"):
        raise _rows_of_columns(x)
    if any(hasattr(part, "tocsr") for part in (x.values() if isinstance(x, dict) else (x,))):
        raise ValueError("Sparse matrices have no dense rows. Pass `x.toarray()`, or batches: a generator of "
                         "`(x[start:stop].toarray(), y[start:stop])`.")
    if _is_indexed(x):
        return _adapt_indexed(x, shuffle, seed)
    # Trees and text are iterables, but not of batches: a tree here has leaves that are not arrays.
    is_iterable = hasattr(x, "__iter__") and not isinstance(x, (str, bytes))
    if not is_iterable or not (is_list_of_batches(x) or jax.tree_util.all_leaves([x], is_leaf)):
        raise ValueError(
            f"Unrecognized data type: {describe(x)}. Expected arrays, a tree of arrays, a trainer.data.Dataset, a "
            f"generator, or another object that yields batches when iterated or indexed.{_hint(x)}"
        )
    length = _iterable_length(x)
    sharded = shard_grain(x, length, processes) if policy is AutoShardPolicy.AUTO else None
    return sharded or IterableSource(x, length)


def _hint(x: object) -> str:
    """Returns a sentence for a value that is not data but leads to data, or an empty string."""
    if isinstance(x, (str, bytes, os.PathLike)):
        return (" A file or folder is read first, as by `numpy.load`, `pandas.read_csv` or "
                "`trainer.data.image_dataset_from_directory`.")
    if callable(x):
        name = getattr(x, "__name__", "")
        return f" Call the function: `{name if name.isidentifier() else 'generator'}()`."
    return ""


def _rows_of_columns(x: object) -> ValueError:
    if hasattr(x, "set_epoch") and not hasattr(x, "__len__"):  # Hugging Face's streams
        return ValueError(
            f"`x` must be arrays, or yield batches. Received: a {_kind(x)} of named columns, which does not say which "
            "columns are inputs and which are targets. Pass `trainer.data.batches_from_columns(data.batch(32), "
            'x="tokens", y="label")` with the names of yours.')
    names = list(x[0]) if isinstance(x, (list, tuple)) and len(x[0]) > 1 else []
    target = next((name for name in names if "label" in str(name) or "target" in str(name)), (names or ["label"])[-1])
    source = next((name for name in names if name != target), "image")
    return ValueError(
        f"`x` must be arrays, or yield batches. Received: a {_kind(x)} of rows or batches with named columns, which "
        f"does not say which columns are inputs and which are targets. Rows: pass `trainer.data.Dataset.from_columns("
        f"data, x={source!r}, y={target!r}).batch(32)`. Batches: yield `(batch[{source!r}], batch[{target!r}])`."
        f"{'' if names else ' Give the names of yours.'}")


def _is_indexed(x: object) -> bool:
    has_length = hasattr(type(x), "num_batches") or (hasattr(x, "__len__") and not hasattr(x, "__iter__"))
    return has_length and hasattr(x, "__getitem__")


def _adapt_indexed(x: Any, shuffle: bool, seed: int) -> IndexedSource:
    length = _indexed_length(x)
    if not hasattr(x, "use_multiprocessing"):
        return IndexedSource(x, length, shuffle, seed)
    # Keras's names for the production of a `PyDataset`'s batches.
    workers, in_processes = as_count("workers", x.workers, 0), bool(x.use_multiprocessing)
    if not workers > (0 if in_processes else 1):
        return IndexedSource(x, length, shuffle, seed)
    # 0 means no limit, as in `queue.Queue`; endless data would then fill the memory.
    most = as_count("max_queue_size", x.max_queue_size, 0) or (
        PyDataset.max_queue_size if length == math.inf else math.inf)
    return ParallelSource(x, length, shuffle, seed, workers, in_processes, most)


def _indexed_length(x: Any) -> Count:
    # `PyDataset.num_batches` is None for an endless dataset.
    length = x.num_batches if hasattr(type(x), "num_batches") else len(x)
    return math.inf if length is None else length


def _iterable_length(x: Any) -> Count | None:
    if hasattr(x, "cardinality"):
        # `tf.data`: -1 means endless, -2 unknown.
        cardinality = int(x.cardinality())
        return {-1: math.inf, -2: None}.get(cardinality, cardinality)
    if isinstance(x, (itertools.count, itertools.cycle)):
        return math.inf
    if isinstance(x, itertools.repeat):
        length = operator.length_hint(x, -1)
        return math.inf if length < 0 else length
    try:
        length = len(x)
    except TypeError:
        return None
    # Grain's value for endless.
    return math.inf if length == sys.maxsize else length


def _kind(x: object) -> str:
    if isinstance(x, SampleSource):
        return "per-worker dataset"
    return "generator" if isinstance(x, types.GeneratorType) else type(x).__name__


def split_validation(data: PyTree, validation_split: float) -> tuple[HostArrays, HostArrays]:
    """Splits arrays into a first part for training and a last part for validation, as Keras does.

    Args:
      data: a tree of arrays with equal first dimensions, such as `(x, y, sample_weight)`; None stays None.
      validation_split: the fraction of the rows, between 0 and 1, that goes to validation.

    Returns:
      `(train, validation)`: views, in the structure of `data`.

    Raises:
      TypeError: if the fraction is not a number.
      ValueError: if the fraction is not between 0 and 1 or leaves a part empty, or the data are not arrays.

    Example:
      >>> train, validation = split_validation((np.arange(10), None), 0.2)
      >>> validation.tree
      (array([8, 9]), None)
    """
    arguments.require({"validation_split": validation_split}, "a number between 0 and 1", lambda share: 0 < share < 1)
    is_of_batches = isinstance(data, tuple) and is_list_of_batches(data[0]) and data[1] is None
    if is_of_batches or not is_array_tree(data):
        given = [part for part in data if part is not None] if isinstance(data, tuple) else [data]
        raise ValueError("`validation_split` is only supported for arrays. Received: "
                         f"{', '.join(map(describe, given))}. Pass `validation_data` instead.")
    arrays = HostArrays.of(data)
    split_at = math.floor(arrays.rows * (1 - validation_split))
    if split_at in (0, arrays.rows):
        raise ValueError(f"`validation_split={validation_split}` leaves one part of {arrays.rows} rows empty. "
                         "Provide more rows or another fraction.")
    return (HostArrays(jax.tree.map(lambda array: array[:split_at], arrays.tree)),
            HostArrays(jax.tree.map(lambda array: array[split_at:], arrays.tree)))
