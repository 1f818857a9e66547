"""Datasets of rows that are made on demand, such as images from files, read ahead by Grain's threads.

Owns the public `RowDataset`: the order of rows, their random numbers, and the Grain pipeline of a pass.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.core.ambient.threads import in_caller_context
from trainer.core.arguments import as_count
from trainer.core.calls.entry_points import foreign_arguments
from trainer.core.foreign_names import ForeignNames
from trainer.core.types import PyTree
from trainer.data.sources import foreign_names
from trainer.data.sources.dataset import generator_of_pass
from trainer.data.sources.maps import ElementMap, apply_maps

if TYPE_CHECKING:
    import grain


class Rows(Protocol):
    """Rows by index; accessed by several threads at once."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


_AHEAD = 4  # ready batches, in addition to the batches in progress


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RowDataset(ForeignNames):
    """An immutable description of batches whose rows are made on demand, by several threads.

    It has the methods of `trainer.data.Dataset`: before `batch` the elements are rows, after it they are batches. After
    `shuffle`, each pass has a new order: iteration yields pass 0, and `fit` reads another pass in each epoch.

    The random numbers of `random_map` depend on the seed, the pass and the row index only: not on threads, the batch
    size or the number of processes. `fit` resumes at any batch without reading the batches before it. With several
    processes, each makes only its own rows, unless batches are mapped.

    Args:
      rows: `rows[i]` returns row i: an array, or a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
      class_names: the names of the classes, by class index; None without classes.
      file_paths: the file of each row; None without files.
      num_threads: number of threads; by default the number of processors.

    Example:
      >>> class Squares:
      ...     def __len__(self):
      ...         return 5
      ...     def __getitem__(self, number):
      ...         return np.float32(number), np.float32(number ** 2)
      >>> dataset = RowDataset(Squares()).batch(2)
      >>> dataset
      RowDataset(3 batches of 2 rows)
      >>> [y.tolist() for x, y in dataset]
      [[0.0, 1.0], [4.0, 9.0], [16.0]]
    """

    rows: Rows
    class_names: list[str] | None = None
    file_paths: list[str] | None = None
    num_threads: int | None = None
    _seed: int | None = None  # seed of the order
    _row_maps: tuple[ElementMap, ...] = ()
    _batch_size: int | None = None
    _drop_remainder: bool = False
    _batch_maps: tuple[ElementMap, ...] = ()

    _foreign_names = foreign_names.METHODS

    @foreign_arguments(foreign_names.SHUFFLE)
    def shuffle(self, seed: int = 0) -> RowDataset:
        """Returns this dataset with its rows in a uniformly random order, a new order in each pass.

        Raises:
          ValueError: if the seed is less than 0, or the dataset is batched.
          TypeError: if the seed is not an integer.
        """
        if self._batch_size is not None:
            raise ValueError("Shuffle rows before `batch`: `dataset.shuffle(seed).batch(batch_size)`.")
        return dataclasses.replace(self, _seed=as_count("seed", seed, 0))

    @foreign_arguments(foreign_names.MAP)
    def map(self, fn: Callable[..., Any]) -> RowDataset:
        """Returns this dataset with `fn` applied to each element, a tuple as separate arguments."""
        return self._mapped((fn, None))

    @foreign_arguments(foreign_names.RANDOM_MAP)
    def random_map(self, fn: Callable[..., Any], seed: int = 0) -> RowDataset:
        """Returns this dataset with `fn` applied to each element, with a random generator as its first argument.

        Args:
          fn: takes a `numpy.random.Generator` and an element, a tuple as separate arguments. The generator of a row
            depends on the seed, the pass and the row index; the generator of a batch on the seed, the pass and its
            position in it.
          seed: distinguishes the random numbers of several maps.

        Example:
          >>> noisy = RowDataset(np.zeros((2, 1))).random_map(lambda rng, x: x + rng.normal(size=1))
          >>> [x.shape for x in noisy.batch(2)]
          [(2, 1)]
        """
        return self._mapped((fn, as_count("seed", seed, 0)))

    @foreign_arguments(foreign_names.BATCH)
    def batch(self, batch_size: int, drop_remainder: bool = False) -> RowDataset:
        """Returns this dataset with `batch_size` consecutive rows as each element.

        Raises:
          ValueError: if `batch_size` is less than 1, the dataset is batched, or the result would be empty.
          TypeError: if `batch_size` is not an integer.
        """
        if self._batch_size is not None:
            raise ValueError(f"The dataset is already batched, with batch_size={self._batch_size}.")
        batch_size = as_count("batch_size", batch_size)
        if drop_remainder and len(self.rows) < batch_size:
            raise ValueError("`drop_remainder=True` leaves the dataset empty: it has "
                             f"{len(self.rows)} rows, fewer than batch_size={batch_size}.")
        return dataclasses.replace(self, _batch_size=batch_size, _drop_remainder=drop_remainder)

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a full batch; None before `batch`."""
        return self._batch_size

    def require_batched(self) -> int:
        """Returns `batch_size`; raises ValueError before `batch`."""
        if self._batch_size is None:
            raise ValueError("The RowDataset has rows as elements, not batches. Call its `batch(batch_size)` first.")
        return self._batch_size

    def __len__(self) -> int:
        if self._batch_size is None:
            return len(self.rows)
        return len(self.rows) // self._batch_size if self._drop_remainder else -(-len(self.rows) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_ahead(self.of_pass(0)))

    def __repr__(self) -> str:
        elements = "rows" if self._batch_size is None else f"batches of {self._batch_size} rows"
        return f"RowDataset({len(self)} {elements})"

    def of_pass(self, pass_index: int, start: int = 0) -> grain.MapDataset:
        """Returns the elements of a pass as a Grain dataset, which makes them on access.

        Args:
          pass_index: index of the pass, from 0.
          start: number of elements to skip.
        """
        grain = _grain()
        numbers = np.arange(len(self.rows))
        if self._seed is not None:
            numbers = generator_of_pass(self._seed, pass_index).permutation(numbers)
        first = start * (self._batch_size or 1)
        elements = grain.MapDataset.source(_RowsOfPass(self.rows, numbers[first:], pass_index, self._row_maps))
        if self._batch_size is not None:
            elements = elements.batch(self._batch_size, drop_remainder=self._drop_remainder)
        if self._batch_maps:
            elements = elements.map_with_index(in_caller_context(_MapsOfPass(pass_index, start, self._batch_maps)))
        return elements

    def read_ahead(self, elements: grain.MapDataset) -> grain.IterDataset:
        """Returns a Grain dataset whose threads make the elements of another dataset ahead of use."""
        grain = _grain()
        threads = self.num_threads or os.cpu_count() or 1
        return elements.to_iter_dataset(grain.ReadOptions(threads, threads + _AHEAD))

    def _mapped(self, entry: ElementMap) -> RowDataset:
        if self._batch_size is None:
            return dataclasses.replace(self, _row_maps=(*self._row_maps, entry))
        return dataclasses.replace(self, _batch_maps=(*self._batch_maps, entry))


def _grain() -> Any:
    """Returns Grain, which makes the rows in its threads.

    Raises:
      ImportError: if it is not installed.
    """
    try:
        import grain
    except ImportError as error:
        raise ImportError("Folders are read with Grain. Install it: pip install 'trainer-jax[grain]', or for images "
                          "'trainer-jax[images]'.") from error
    return grain


class _RowsOfPass:
    """The rows of a pass in its order, made on access."""

    def __init__(self, rows: Rows, numbers: np.ndarray, pass_index: int, maps: tuple[ElementMap, ...]):
        self._rows, self._numbers, self._pass_index, self._maps = rows, numbers, pass_index, maps
        self._make = in_caller_context(self._row)  # runs in Grain's threads

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> Any:
        return self._make(position)

    def _row(self, position: int) -> Any:
        number = int(self._numbers[position])
        return apply_maps(self._maps, self._rows[number], (self._pass_index, number))


class _MapsOfPass:
    def __init__(self, pass_index: int, start: int, maps: tuple[ElementMap, ...]):
        self._pass_index, self._start, self._maps = pass_index, start, maps

    def __call__(self, position: int, batch: PyTree) -> Any:
        return apply_maps(self._maps, batch, (self._pass_index, self._start + position))
