"""The arrays in memory that a dataset's rows come from, as one object that can be recognised again.

Owns their identity: everything derived from one dataset shares it, so what was made from the arrays once, such as a
copy on the devices, is found again. It must not know what is made from them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from trainer.data.sources.arrays import canonical_dtype, check_integers_fit, gather_rows
from trainer.data.sources.buffers import BufferPool


class HostArrays:
    """A tree of numpy arrays with equal first dimensions; compared by identity.

    Args:
      tree: the arrays, which nobody writes to.

    Attributes:
      tree: see above.
      rows: their first dimension.
      nbytes: how many bytes they take in the dtypes that JAX gives them.

    Raises:
      DataError: integers would wrap around in these dtypes. Looked at here, once, and not when rows are gathered.
    """

    def __init__(self, tree: Any):
        check_integers_fit(tree)
        leaves = jax.tree.leaves(tree)
        self.tree = tree
        self.rows: int = leaves[0].shape[0]
        self.nbytes = sum(leaf.size * canonical_dtype(leaf.dtype).itemsize for leaf in leaves)

    def gather(self, index: np.ndarray, capacity: int | None, pool: BufferPool) -> Any:
        """Returns the rows at `index` of every array: owned copies in their canonical dtypes.

        Args:
          index: integers of shape `(count, ...)`.
          capacity: how many entries the results have capacity for; None for `count`.
          pool: where their memory comes from.

        Returns:
          Arrays of shape `(capacity, *index.shape[1:], ...)`, of which all after `count` is undefined.
        """
        def gathered(array: np.ndarray) -> np.ndarray:
            shape = (capacity or len(index), *index.shape[1:], *array.shape[1:])
            filled = pool.empty(shape, canonical_dtype(array.dtype))
            gather_rows(array, index, filled[:len(index)])
            return filled

        return jax.tree.map(gathered, self.tree)
