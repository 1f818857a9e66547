"""The base class of data that users compute batch by batch, in Keras's words.

Owns the words alone: sources read it, and workers (`parallel_items.py`) share the reading.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from trainer.core.arguments import as_count, require_bool


class PyDataset:
    """Batches that Python code makes one by one, each by its number.

    A subclass defines `__getitem__`, and `__len__` or `num_batches`. `fit`, `evaluate` and `predict` read it, with
    workers ahead of the step: batches and their order are the same for any number of them.

    Args:
      workers: how many threads or processes make batches; up to 1 thread, batches are made one after another.
      use_multiprocessing: make them in processes, for Python code that computes. The processes are spawned, and not
        forked: the data set must be such that `multiprocessing` can send it (a class of a module, no open files), and a
        script must begin its training within `if __name__ == "__main__":`. JAX runs on the CPU there.
      max_queue_size: how many batches are made or ready at once, at most.

    Code that draws random numbers should derive them from the batch's number: workers make batches in any order.

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

    # Of the class too, for subclasses that do not call `super().__init__()`.
    workers = 1
    use_multiprocessing = False
    max_queue_size = 10

    def __init__(self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10):
        require_bool(use_multiprocessing=use_multiprocessing)
        self.workers = as_count("workers", workers, 0)
        self.use_multiprocessing = bool(use_multiprocessing)
        self.max_queue_size = as_count("max_queue_size", max_queue_size)

    def __getitem__(self, index: int) -> Any:
        """Returns a batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Args:
          index: its number, from 0 on.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `__getitem__(self, index)`, which returns the "
                                  "batch of a number.")

    @property
    def num_batches(self) -> int | None:
        """How many batches there are; None for endless data."""
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
        """Called after the last batch of each epoch was read, for an order of rows of the data set's own."""


Sequence = PyDataset  # Keras's older name
