"""The batches of a `RowDataset` by pass and position; each process reads its own rows."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from trainer.data.files.row_dataset import RowDataset
from trainer.data.sharding.grain_shards import shard_grain
from trainer.data.sharding.processes import Processes
from trainer.data.sources.dataset import SeekingSource
from trainer.data.sources.sources import IterableSource


class RowSource(SeekingSource):
    """Batches of a `RowDataset`, from any position without reading earlier batches.

    Args:
      dataset: the batched dataset.
      processes: the processes that read it; None if each reads all rows.
    """

    is_exact = True  # if the files and the user's maps are the same

    def __init__(self, dataset: RowDataset, processes: Processes | None):
        batch_size = dataset.require_batched()
        self._dataset, self._processes = dataset, processes
        self.num_batches = len(dataset)
        self.rows = min(len(dataset) * batch_size, len(dataset.rows))

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        elements = self._dataset.read_ahead(self._dataset.of_pass(pass_index, start))
        length = self.num_batches - start
        sharded = None if self._processes is None else shard_grain(elements, length, self._processes)
        return (sharded or IterableSource(elements, length)).read(0)
