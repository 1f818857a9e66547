"""The data of `adapt` and of calls as arrays on the host: whole arrays, or batch by batch.

Owns the reading of each kind of data, and of text, integers and missing values in arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trainer.core.arguments import as_count
from trainer.core.categories.vocabularies import is_missing
from trainer.core.errors import describe
from trainer.data.files.row_dataset import RowDataset
from trainer.data.sources.arrays import DataError, column_array, is_list_of_batches, unpack_x_y_sample_weight
from trainer.data.sources.dataset import Dataset

ROWS = 1024  # of a batch of rows that are not batched
_CHUNK = 2**16  # rows of an array that are converted at a time


def host_array(values: object) -> np.ndarray:
    """Returns values as a NumPy array: an array, a tensor, a column of a table, or a list.

    Raises:
      DataError: if the rows differ in shape.
    """
    if isinstance(values, (list, tuple)):
        return column_array(list(values))
    if isinstance(values, (str, bytes)) or np.ndim(values) == 0:  # type: ignore[arg-type]
        return np.asarray(values)
    return column_array(values)


def whole_array(data: object) -> np.ndarray | None:
    """Returns data that are an array, a column or a list of values as an array; None for batches.

    A list of arrays, of tuples of arrays or of dicts is a list of batches.
    """
    if isinstance(data, (list, tuple)):
        is_batches = is_list_of_batches(data) or (bool(data) and all(
            isinstance(item, Mapping) or (hasattr(item, "shape") and len(item.shape)) for item in data))
        return None if is_batches else host_array(data)
    is_array = hasattr(data, "__array__") or (hasattr(data, "detach") and hasattr(data, "cpu"))
    return host_array(data) if is_array and not hasattr(data, "column_names") else None


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array with at least one axis in parts of some rows, so that conversions need little memory."""
    for start in range(0, len(array), _CHUNK):
        yield array[start:start + _CHUNK]


def batches_of(data: object, steps: int | None, owner: str) -> Iterator[np.ndarray]:
    """Yields `x` of each batch as an array.

    Args:
      data: a `Dataset`, or an iterable or indexed object of batches.
      steps: number of batches; None for all.
      owner: name of the layer, for errors.

    Raises:
      TypeError: if `data` is of another kind.
      ValueError: if `data` are endless and `steps` is None, or yield no batch, or a batch is not an array.
    """
    for x in inputs_of(data, steps):
        if isinstance(x, Mapping):
            raise DataError(f"`{owner}.adapt` takes one column. Received: {describe(x)}. Select it: "
                            "`dataset.map(lambda x, y: x[\"name\"])`; `FeatureSpace` adapts to several columns.")
        yield host_array(x)


def inputs_of(data: object, steps: int | None) -> Iterator[Any]:
    """Yields `x` of each batch as it is; see `batches_of`."""
    is_empty = True
    for batch in itertools.islice(_elements(data, steps), None if steps is None else as_count("steps", steps)):
        is_empty = False
        yield unpack_x_y_sample_weight(batch)[0] if isinstance(batch, (tuple, list)) else batch
    if is_empty:
        raise DataError(f"`adapt` needs at least one batch. Received: {describe(data)}, which yields none.")


def _elements(data: Any, steps: int | None) -> Iterable[Any]:
    if isinstance(data, (Dataset, RowDataset)):
        batched = data if data.batch_size else data.batch(ROWS)
        if steps is None and isinstance(batched, Dataset) and batched.cardinality == float("inf"):
            raise DataError("The dataset is endless: give `adapt` the number of batches to read, as `steps`, or the "
                            "dataset before `repeat`.")
        return batched
    has_batches = not isinstance(data, (str, bytes, Mapping)) and not hasattr(data, "column_names")
    if has_batches and hasattr(data, "__iter__"):
        return data
    count = getattr(type(data), "num_batches", None)
    if count is not None or (has_batches and hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        length = data.num_batches if count is not None else len(data)
        return (data[number] for number in range(length))
    raise TypeError("`data` must be an array, a list of values, a column of a table, a trainer.data.Dataset, or an "
                    f"iterable of batches. Received: {describe(data)}.")


def as_texts(
    owner: str, values: np.ndarray, encoding: str = "utf-8", missing: str | None = None, fix: str = ""
) -> list[str]:
    """Returns an array of text as a flat list.

    Args:
      owner: name of the layer, for errors.
      values: strings, or bytes.
      encoding: the encoding of bytes.
      missing: text for None, NaN and pandas' NA; None to refuse them.
      fix: sentence with advice for missing values.

    Raises:
      DataError: if there are other values, or missing values that are refused.
    """
    if not values.size:  # an empty list is an array of floats
        return []
    if values.dtype.kind == "S":
        return [text.decode(encoding) for text in values.ravel().tolist()]
    texts: list[Any] = values.ravel().tolist()
    if values.dtype.kind == "U":
        return texts
    if values.dtype.kind not in "OT":
        raise DataError(f"{owner} takes text. Received: {describe(values)}. Use `IntegerLookup` for whole numbers, or "
                        "convert them by `astype(str)`.")
    absent = 0
    for place, text in enumerate(texts):
        if isinstance(text, bytes):
            texts[place] = text.decode(encoding)
        elif not isinstance(text, str):
            if not is_missing(text):
                raise DataError(f"{owner} takes text. Received: {describe(values)} with a value of type "
                                f"{type(text).__name__}. Convert the column by `astype(str)`.")
            absent, texts[place] = absent + 1, missing
    if absent and missing is None:
        raise missing_values(owner, absent, len(texts), fix)
    return texts


def as_integers(owner: str, values: np.ndarray, missing: int | None = None, fix: str = "") -> np.ndarray:
    """Returns an array as int64; see `as_texts` for missing values.

    Raises:
      DataError: if there are values other than whole numbers that fit into int64, or missing values that are refused.
    """
    kind = values.dtype.kind
    if kind == "O":
        numbers: list[Any] = values.ravel().tolist()
        absent = np.fromiter(map(is_missing, numbers), bool, len(numbers)).reshape(values.shape)
        filled = [0 if is_missing(number) else number for number in numbers]
        if not all(isinstance(number, (int, float, np.integer)) for number in filled):
            raise _no_integers(owner, values)
        try:
            values = np.array(filled).reshape(values.shape)
        except OverflowError:
            raise _no_integers(owner, values) from None
        kind = values.dtype.kind
    elif kind == "f":
        absent = np.isnan(values)
        values = np.where(absent, 0, values)
    else:
        absent = np.zeros(values.shape, bool)
    if kind == "f":
        whole = values.astype(np.int64) if np.all(np.abs(values) < 2.0**63) else None
        if whole is None or (whole != values).any():
            raise _no_integers(owner, values)
        values = whole
    elif kind not in "biu" or (kind == "u" and values.size and values.max() > np.iinfo(np.int64).max):
        raise _no_integers(owner, values)
    values = values.astype(np.int64)
    if not absent.any():
        return values
    if missing is None:
        raise missing_values(owner, int(absent.sum()), absent.size, fix)
    return np.where(absent, missing, values)


FILL = "Fill them in before, such as by pandas' `fillna`."  # advice on missing numbers


def missing_values(owner: str, absent: int, total: int, fix: str) -> DataError:
    """Returns the error for values that are None, NaN or pandas' NA."""
    return DataError(f"{owner} received {absent} missing values (None, NaN or NA) among {total}. {fix}")


def _no_integers(owner: str, values: np.ndarray) -> DataError:
    is_number = values.dtype.kind in "biuf"
    advice = "Use `Discretization` for real numbers." if is_number else "Use `StringLookup` for text."
    return DataError(f"{owner} takes whole numbers. Received: {describe(values)}. {advice}")
