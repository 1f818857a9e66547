"""The base class of data that users compute batch by batch, with Keras's interface.

Owns the interface only: sources read it, and workers (`parallel_items.py`) share the reading.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from trainer.core.arguments import as_count, require_bool


class PyDataset:
    """Batches that Python code makes by index.

    A subclass defines `__getitem__`, and `__len__` or `num_batches`. `fit`, `evaluate` and `predict` read it, with
    workers ahead of the step: the batches and their order do not depend on the number of workers.

    Args:
      workers: number of threads or processes that make batches; up to 1 thread, batches are made sequentially.
      use_multiprocessing: whether to use processes, for compute-bound Python code. Processes are spawned, and not
        forked: `multiprocessing` must be able to send the data set (a class of a module, no open files), and a script
        must start its training within `if __name__ == "__main__":`. JAX runs on the CPU there.
      max_queue_size: maximum number of batches in progress or ready; 0 for no limit, or 10 of endless data.

    Derive random numbers from the index of the batch, because workers make batches in any order.

    Example:

    >>> import numpy as np
    >>> class Squares(PyDataset):
    ...     def __len__(self):
    ...         return 3
    ...     def __getitem__(self, index):
    ...         x = np.arange(4.0)[:, None] + 4 * index
    ...         return x, x**2
    >>> [float(y[0, 0]) for x, y in Squares(workers=2)]
    [0.0, 16.0, 64.0]

    Source: https://keras.io/api/utils/python_utils/#pydataset-class.
    """

    # Also class attributes, for subclasses that do not call `super().__init__()`.
    workers = 1
    use_multiprocessing = False
    max_queue_size = 10

    def __init__(self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10):
        require_bool(use_multiprocessing=use_multiprocessing)
        self.workers = as_count("workers", workers, 0)
        self.use_multiprocessing = bool(use_multiprocessing)
        self.max_queue_size = as_count("max_queue_size", max_queue_size, 0)

    def __getitem__(self, index: int) -> Any:
        """Returns a batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Args:
          index: the index of the batch, from 0.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `__getitem__(self, index)`, which returns the "
                                  "batch of a number.")

    @property
    def num_batches(self) -> int | None:
        """Number of batches; None for endless data."""
        if hasattr(self, "__len__"):
            return len(self)
        raise NotImplementedError(f"`{type(self).__name__}` must define `__len__`, which returns the number of "
                                  "batches, or a property `num_batches`, which may be None.")

    def __iter__(self) -> Iterator[Any]:
        count = self.num_batches
        for index in itertools.count() if count is None else range(count):
            yield self[index]

    def on_epoch_begin(self) -> None:
        """Called before the first batch of each epoch is made."""

    def on_epoch_end(self) -> None:
        """Called after the last batch of each epoch was read, for example to reorder rows."""


Sequence = PyDataset  # Keras's older name
