"""The arrays in memory that a dataset's rows come from, as one object that can be recognised again.

Owns their identity: everything derived from one dataset shares it, so what was made from the arrays once, such as a
copy on the devices, is found again. It must not know what is made from them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from trainer.data.arrays import canonical_dtype, gather_rows


class HostArrays:
    """A tree of numpy arrays with equal first dimensions; compared by identity.

    Args:
      tree: the arrays, which nobody writes to.

    Attributes:
      tree: see above.
      rows: their first dimension.
      nbytes: how many bytes they take in the dtypes that JAX gives them.
    """

    def __init__(self, tree: Any):
        leaves = jax.tree.leaves(tree)
        self.tree = tree
        self.rows: int = leaves[0].shape[0]
        self.nbytes = sum(leaf.size * canonical_dtype(leaf.dtype).itemsize for leaf in leaves)

    def gather(self, index: np.ndarray, room: int | None = None) -> Any:
        """Returns the rows at `index` of every array, owned; see `gather_rows`."""
        return jax.tree.map(lambda array: gather_rows(array, index, room), self.tree)
