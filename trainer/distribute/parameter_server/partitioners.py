"""Partitioners of variables, as in `tf.distribute`. Only tables of `nn.Embed` are split; see `partition.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from trainer.core import arguments


class Partitioner:
    """Chooses the number of parts of a variable along each axis; all axes but the first have a single part."""

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts for each axis of a variable.

        Args:
          shape: shape of the variable.
          dtype: dtype of the variable.
          axis: the axis to split.
        """
        rows = shape[axis] if shape else 1
        parts = self._parts(math.prod(shape) * np.dtype(dtype).itemsize, rows)
        return [min(max(parts, 1), rows) if index == axis else 1 for index in range(len(shape))]

    def _parts(self, nbytes: int, rows: int) -> int:
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Splits every variable into the same number of parts.

    Example:
      >>> FixedShardsPartitioner(2)((10, 3), "float32")
      [2, 1]

    Source: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """

    def __init__(self, num_shards: int):
        self._num_shards = arguments.as_count("num_shards", num_shards)

    def _parts(self, nbytes: int, rows: int) -> int:
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """Splits variables into at most `max_shards` parts, none smaller than `min_shard_bytes`.

    Example:
      >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
      [2, 1]

    Source: `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1):
        self._least = arguments.as_count("min_shard_bytes", min_shard_bytes)
        self._max_shards = arguments.as_count("max_shards", max_shards)

    def _parts(self, nbytes: int, rows: int) -> int:
        return min(self._max_shards, nbytes // self._least)


class MaxSizePartitioner(Partitioner):
    """Splits variables into the fewest parts of at most `max_shard_bytes` each, and at most `max_shards` parts.

    Example:
      >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
      [6, 1]

    Source: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None):
        self._most = arguments.as_count("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else arguments.as_count("max_shards", max_shards)

    def _parts(self, nbytes: int, rows: int) -> int:
        parts = math.ceil(nbytes / self._most)
        return parts if self._max_shards is None else min(parts, self._max_shards)
