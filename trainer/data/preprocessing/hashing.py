"""Hashing: strings and integers to a fixed number of bins."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.categories.hash_buckets import Salt, hash_buckets
from trainer.core.configs import Config
from trainer.core.errors import describe, wrong_type
from trainer.data.preprocessing.batches import as_integers, as_texts, host_array
from trainer.data.preprocessing.encoding import ENCODINGS, encode
from trainer.data.preprocessing.layer import PreprocessingLayer, as_float_dtype, refuse_sparse

_FIX = "Fill them, by `fillna(\"\")` in data frames, or give a `mask_value`."


class Hashing(PreprocessingLayer):
    """Replaces each string or integer by the index of a bin, on the host, with TensorFlow's hashes.

    Nothing is learned: a value has the same bin in every process, and different values may share a bin. Floats are
    truncated to integers, as in Keras.

    Args:
      num_bins: number of bins, including the bin of `mask_value`.
      mask_value: a value that gets bin 0, as missing values (None, NaN, NA) do; all other values get other bins.
        Without a `mask_value`, missing values are refused.
      salt: one or two integers, the key of SipHash. None uses FarmHash, which has no key.
      output_mode: "int" for indices; "one_hot", "multi_hot" or "count", see `CategoryEncoding`.
      sparse: must be False.
      name: name of the layer.
      dtype: dtype of the result: int64 or int32 for indices, by default int64; float32 by default for encodings.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range, or `sparse` is True.

    Example:
      >>> Hashing(num_bins=3)([["A"], ["B"], ["C"], ["D"], ["E"]]).tolist()
      [[1], [0], [1], [1], [2]]
      >>> Hashing(num_bins=3, salt=(133, 137))([["A"], ["B"], ["C"], ["D"], ["E"]]).tolist()
      [[1], [2], [1], [0], [2]]

    Source: `keras.layers.Hashing`.
    """

    def __init__(
        self, num_bins: int, mask_value: str | int | None = None, salt: int | Sequence[int] | None = None,
        output_mode: str = "int", sparse: bool = False, *, name: str | None = None, dtype: DTypeLike | None = None,
    ):
        super().__init__(name)
        refuse_sparse(sparse)
        self.num_bins = arguments.as_count("num_bins", num_bins)
        if mask_value is not None and not isinstance(mask_value, (str, int, np.integer)):
            raise wrong_type("mask_value", mask_value, "a string, a whole number or None")
        self.mask_value = int(mask_value) if isinstance(mask_value, np.integer) else mask_value
        self.salt = as_salt(salt)
        self.output_mode = arguments.check_word("output_mode", output_mode, ("int", *ENCODINGS))
        self.dtype = as_index_dtype(dtype) if output_mode == "int" else as_float_dtype(dtype)

    def __call__(self, inputs: ArrayLike) -> np.ndarray:
        """Returns the indices of bins, or their encoding.

        Args:
          inputs: strings, integers or floats.

        Raises:
          TypeError: if `inputs` are traced by JAX, which has no 64-bit hashes.
          ValueError: if `inputs` are of other kinds, or have missing values without a `mask_value`.
        """
        array = on_host("Hashing", inputs)
        if self.output_mode == "one_hot" and array.ndim and array.shape[-1] == 1:
            array = array[..., 0]
        has_mask = self.mask_value is not None and self.num_bins > 1
        buckets = self.num_bins - 1 if has_mask else self.num_bins
        values, is_masked = self._values(array)
        indices = hash_buckets(values, buckets, self.salt)
        if has_mask:
            indices = np.where(is_masked, 0, indices + 1)
        return np.asarray(encode(indices, self.output_mode, self.num_bins, self.dtype))

    def _values(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values to hash, and where the mask is."""
        is_text = isinstance(self.mask_value, str)
        if array.dtype.kind == "f" and not np.isnan(array).any():
            array = array.astype(np.int64)
        if array.dtype.kind in "iu" or (array.dtype.kind in "Of" and _has_number(array)):
            numbers = as_integers("Hashing", array, None if is_text else self.mask_value, _FIX)  # type: ignore[arg-type]
            return numbers, numbers == self.mask_value
        texts = as_texts("Hashing", array, missing=self.mask_value if is_text else None, fix=_FIX)  # type: ignore[arg-type]
        masked = np.fromiter((text == self.mask_value for text in texts), bool, len(texts))
        return as_objects(texts, array.shape), masked.reshape(array.shape)

    def get_config(self) -> Config:
        return {"num_bins": self.num_bins, "mask_value": self.mask_value,
                "salt": None if self.salt is None else list(self.salt), "output_mode": self.output_mode,
                "name": self.name, "dtype": self.dtype.name}


def on_host(owner: str, inputs: object) -> np.ndarray:
    """Returns inputs as an array on the host.

    Raises:
      TypeError: if they are traced.
    """
    if isinstance(inputs, jax.core.Tracer):
        raise TypeError(f"{owner} runs on the host, and cannot be a part of a compiled module. Received: "
                        f"{describe(inputs)} of a JAX program. Call it before: `dataset.map(lambda x, y: (layer(x), "
                        "y))`.")
    return host_array(inputs)


def as_objects(texts: list[str], shape: tuple[int, ...], encoding: str = "utf-8") -> np.ndarray:
    """Returns strings as an array of bytes objects."""
    objects = np.empty(len(texts), object)
    objects[:] = [text.encode(encoding) for text in texts]
    return objects.reshape(shape)


def as_salt(salt: object) -> Salt | None:
    """Returns the key of SipHash for one integer or two.

    Raises:
      TypeError: if `salt` is anything else.
      ValueError: if a number does not fit into 64 bits.
    """
    if salt is None:
        return None
    parts = list(salt) if isinstance(salt, (list, tuple)) else [salt, salt]
    expected = "a whole number from 0 to 2**64 - 1, two of them, or None"
    if len(parts) != 2:
        raise ValueError(f"`salt` must be {expected}. Received: {len(parts)} numbers.")
    first, second = (arguments.as_count("salt", part, 0, expected) for part in parts)
    if max(first, second) >= 2**64:
        raise ValueError(f"`salt` must be {expected}. Received: salt={salt}.")
    return first, second


def as_index_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Returns the dtype of indices, by default int64; raises ValueError for dtypes other than int32 and int64."""
    found = arguments.as_dtype("dtype", "int64" if dtype is None else dtype)
    if found not in (np.int32, np.int64):
        raise ValueError(f"`dtype` must be 'int32' or 'int64' with output_mode='int'. Received: {found}.")
    return found


def _has_number(array: np.ndarray) -> bool:
    return any(isinstance(value, (int, float, np.integer)) and value == value for value in array.flat)
