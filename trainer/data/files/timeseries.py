"""Windows of a time series, with the arguments of Keras."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from trainer.core import arguments
from trainer.core.arguments import as_count
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import unknown_name
from trainer.data.sources.arrays import DataError
from trainer.data.sources.dataset import Dataset


@explains_arguments
@arguments.checked
def timeseries_dataset_from_array(
    data: Any, targets: Any, sequence_length: int, sequence_stride: int = 1, sampling_rate: int = 1,
    batch_size: int | None = 128, shuffle: bool = False, seed: int | None = None, start_index: int | None = None,
    end_index: int | None = None, format: Literal["tf", "grain"] = "tf",
) -> Dataset:
    """Returns windows of a time series as a `Dataset`, which gathers them batch by batch: nothing is stored twice.

    Args:
      data: the series, time first.
      targets: the target of the window that starts at each time step of `data`, counted from the first time step and
        not from `start_index`; None for windows without targets.
      sequence_length: number of time steps per window.
      sequence_stride: distance between the starts of successive windows, in time steps.
      sampling_rate: distance between successive time steps within a window.
      batch_size: rows per batch; None gives single windows.
      shuffle: whether to read the windows in a new order in each epoch.
      seed: seed of the order; by default 0.
      start_index: the first time step to use.
      end_index: the time step after the last to use.
      format: Keras's choice between tf.data and Grain, which give the same windows; the result is a `Dataset` anyway.

    Raises:
      ValueError: if an argument is out of range, or no window fits.

    >>> dataset = timeseries_dataset_from_array(np.arange(6), np.arange(6) * 10, sequence_length=3, batch_size=2)
    >>> [(x.tolist(), y.tolist()) for x, y in dataset]
    [([[0, 1, 2], [1, 2, 3]], [0, 10]), ([[2, 3, 4], [3, 4, 5]], [20, 30])]

    Source: `keras.utils.timeseries_dataset_from_array`.
    """
    if format not in ("tf", "grain"):
        raise unknown_name("format", str(format), ("tf", "grain"))
    series = np.asarray(data)
    length = as_count("sequence_length", sequence_length)
    stride, rate = as_count("sequence_stride", sequence_stride), as_count("sampling_rate", sampling_rate)
    start = 0 if start_index is None else as_count("start_index", start_index, 0)
    end = len(series) if end_index is None else as_count("end_index", end_index)
    if not start < end <= len(series):
        raise ValueError("`start_index` must be below `end_index`, and both within the data. Received: "
                         f"start_index={start_index}, end_index={end_index}, for {len(series)} times.")
    last = end - (length - 1) * rate
    if targets is not None:
        last = min(last, len(targets))
    begins = np.arange(start, last, stride)
    if not begins.size:
        raise DataError(f"No window of {length} times, {rate} apart, fits into the {end - start} times of the data"
                        f"{'' if targets is None else f' and the {len(targets)} targets'}.")
    offsets = np.arange(length) * rate
    dataset = Dataset.from_arrays(begins)
    if shuffle:
        dataset = dataset.shuffle(0 if seed is None else arguments.as_seed("seed", seed))
    goals = None if targets is None else np.asarray(targets)

    def windows(first: np.ndarray) -> Any:
        x = series[np.asarray(first)[..., None] + offsets]
        return x if goals is None else (x, goals[first])

    return (dataset if batch_size is None else dataset.batch(batch_size)).map(windows)
