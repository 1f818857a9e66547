"""CategoryEncoding: indices of categories as one-hot or multi-hot vectors, or counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import describe
from trainer.data.preprocessing.batches import as_integers, host_array
from trainer.data.preprocessing.encoding import ENCODINGS, encode
from trainer.data.preprocessing.layer import Array, PreprocessingLayer, as_float_dtype, refuse_sparse
from trainer.data.sources.arrays import DataError


class CategoryEncoding(PreprocessingLayer):
    """Encodes indices of categories, on the host or in a module.

    Args:
      num_tokens: number of categories; indices are from 0 to `num_tokens - 1`.
      output_mode: "one_hot": a vector for each index, of shape `(..., num_tokens)`, where a last axis of size 1 is
        replaced; "multi_hot": one vector for each row of indices, `(rows, n)` to `(rows, num_tokens)`; "count": the
        same with the number of occurrences of each index.
      sparse: must be False.
      name: name of the layer.
      dtype: dtype of the result; by default float32.

    Raises:
      TypeError: if `num_tokens` is not an integer.
      ValueError: if an argument is out of range, or `sparse` is True; in a call on the host, if an index is out of
        range. A compiled program cannot raise, and encodes such an index as zeros.

    Example:
      >>> CategoryEncoding(3, output_mode="one_hot")([2, 0]).tolist()
      [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
      >>> CategoryEncoding(3, output_mode="count")([[0, 0, 1]], count_weights=[[0.5, 1.0, 2.0]]).tolist()
      [[1.5, 2.0, 0.0]]

    Source: `keras.layers.CategoryEncoding`.
    """

    def __init__(self, num_tokens: int, output_mode: str = "multi_hot", sparse: bool = False, *,
                 name: str | None = None, dtype: DTypeLike | None = None):
        super().__init__(name)
        refuse_sparse(sparse)
        self.num_tokens = arguments.as_count("num_tokens", num_tokens)
        self.output_mode = arguments.check_word("output_mode", output_mode, ENCODINGS)
        self.dtype = as_float_dtype(dtype)

    def __call__(self, inputs: ArrayLike, count_weights: ArrayLike | None = None) -> Array:
        """Returns the encoding of indices.

        Args:
          inputs: integers.
          count_weights: for `output_mode="count"`, numbers to add instead of 1, of the shape of `inputs`.

        Raises:
          ValueError: if an index is out of range, `inputs` are not integers, or `count_weights` have another shape.
        """
        if isinstance(inputs, jax.Array):
            array: Array = inputs
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise DataError(f"CategoryEncoding takes integers. Received: {describe(array)}.")
        else:
            array = as_integers("CategoryEncoding", host_array(inputs), fix="Give them an index of their own.")
            if array.size and not 0 <= array.min() <= array.max() < self.num_tokens:
                raise DataError(f"CategoryEncoding takes indices from 0 to {self.num_tokens - 1}. Received: "
                                f"{describe(array)} from {array.min()} to {array.max()}. Set `num_tokens` to the "
                                "number of categories.")
        weights = None
        if count_weights is not None:
            if self.output_mode != "count":
                raise ValueError("`count_weights` is for output_mode='count'. Received: output_mode="
                                 f"{self.output_mode!r}.")
            weights = (jnp if isinstance(array, jax.Array) else np).asarray(count_weights, self.dtype)
            if weights.shape != array.shape:
                raise DataError(f"`count_weights` must have the shape of the indices, {array.shape}. Received: "
                                f"{describe(weights)}.")
        return encode(array, self.output_mode, self.num_tokens, self.dtype, weights)

    def get_config(self) -> Config:
        return {"num_tokens": self.num_tokens, "output_mode": self.output_mode, "name": self.name,
                "dtype": self.dtype.name}
