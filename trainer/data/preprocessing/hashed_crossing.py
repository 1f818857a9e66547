"""HashedCrossing: combinations of categories to a fixed number of bins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.categories.fingerprints import DEFAULT_HASH_KEY, chain
from trainer.core.categories.hash_buckets import hashes
from trainer.core.configs import Config
from trainer.core.errors import describe, wrong_type
from trainer.data.preprocessing.batches import as_integers, as_texts
from trainer.data.preprocessing.encoding import encode
from trainer.data.preprocessing.hashing import as_index_dtype, as_objects, on_host
from trainer.data.preprocessing.layer import PreprocessingLayer, as_float_dtype, refuse_sparse
from trainer.data.sources.arrays import DataError

_FIX = "Fill them before, by `fillna` in data frames."


class HashedCrossing(PreprocessingLayer):
    """Replaces each combination of values of several features by the index of a bin, on the host.

    The hashes are TensorFlow's. Different combinations may share a bin.

    Args:
      num_bins: number of bins.
      output_mode: "int" for indices, or "one_hot".
      sparse: must be False.
      name: name of the layer.
      dtype: dtype of the result: int64 or int32 for indices, by default int64; float32 by default for vectors.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range, or `sparse` is True.

    Example:
      >>> HashedCrossing(num_bins=5)((["A", "B", "A", "B", "A"], [101, 101, 101, 102, 102])).tolist()
      [1, 4, 1, 1, 3]

    Source: `keras.layers.HashedCrossing`.
    """

    def __init__(self, num_bins: int, output_mode: str = "int", sparse: bool = False, name: str | None = None,
                 dtype: DTypeLike | None = None):
        super().__init__(name)
        refuse_sparse(sparse)
        self.num_bins = arguments.as_count("num_bins", num_bins)
        self.output_mode = arguments.check_word("output_mode", output_mode, ("int", "one_hot"))
        self.dtype = as_index_dtype(dtype) if output_mode == "int" else as_float_dtype(dtype)

    def __call__(self, inputs: Sequence[ArrayLike]) -> np.ndarray:
        """Returns the indices of bins, or vectors.

        Args:
          inputs: a list or a tuple of at least two arrays of strings or integers, all of shape `()`, `(rows,)` or
            `(rows, 1)`.

        Raises:
          TypeError: if `inputs` is not a list or tuple, or is traced by JAX.
          ValueError: if the arrays are fewer than two, differ in shape, or have missing or other values.
        """
        if not isinstance(inputs, (list, tuple)):
            raise wrong_type("inputs", inputs, "a list or a tuple of arrays to cross")
        if len(inputs) < 2:
            raise DataError(f"HashedCrossing takes at least two arrays. Received: {len(inputs)}.")
        arrays = [on_host("HashedCrossing", values) for values in inputs]
        shape = arrays[0].shape
        if len(shape) > 2 or shape[1:] not in ((), (1,)) or any(array.shape != shape for array in arrays):
            raise DataError("HashedCrossing takes arrays of one shape, `()`, `(rows,)` or `(rows, 1)`. Received: "
                            f"{', '.join(map(describe, arrays))}.")
        prints = np.full(int(np.prod(shape)), DEFAULT_HASH_KEY, np.uint64)
        for array in arrays:
            prints = chain(prints, _prints(array).ravel())
        indices = (prints % np.uint64(self.num_bins)).astype(np.int64).reshape(shape)
        return np.asarray(encode(indices, self.output_mode, self.num_bins, self.dtype))

    def get_config(self) -> Config:
        return {"num_bins": self.num_bins, "output_mode": self.output_mode, "name": self.name,
                "dtype": self.dtype.name}


def _prints(array: np.ndarray) -> np.ndarray:
    """Returns fingerprints; integers are their own."""
    if array.dtype.kind in "biu":
        return as_integers("HashedCrossing", array).view(np.uint64)
    texts = as_texts("HashedCrossing", array, fix=_FIX)
    return hashes(as_objects(texts, array.shape))
