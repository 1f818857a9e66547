"""Discretization: real numbers to the indices of bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import describe
from trainer.data.preprocessing.batches import host_array, missing_values
from trainer.data.preprocessing.encoding import ENCODINGS, encode
from trainer.data.preprocessing.layer import AdaptableLayer, Array, as_float_dtype, check_numbers, refuse_sparse
from trainer.data.sources.arrays import DataError


class Discretization(AdaptableLayer):
    """Replaces each number by the index of its bin, on the host or in a module.

    The bins have the given `bin_boundaries`, or about the same number of values each after `adapt`, which approximates
    quantiles as Keras does. Bin `i` holds numbers of at least boundary `i - 1` and below boundary `i`. NaN is in the
    last bin, as in Keras.

    Args:
      bin_boundaries: numbers in increasing order.
      num_bins: number of bins that `adapt` makes. Give either this or `bin_boundaries`.
      epsilon: tolerance of the quantiles, as a share of the values; a smaller tolerance takes longer.
      output_mode: "int" for int32 indices; "one_hot", "multi_hot" or "count", see `CategoryEncoding`.
      sparse: must be False.
      dtype: dtype of an encoding; by default float32.
      name: name of the layer.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range, both or none of `bin_boundaries` and `num_bins` are given, or `sparse`
        is True.

    Example:
      >>> Discretization(bin_boundaries=[0.0, 1.0, 2.0])([[-1.5, 1.0], [3.4, 0.5]]).tolist()
      [[0, 2], [3, 1]]
      >>> layer = Discretization(num_bins=4)
      >>> layer.adapt([[-1.5, 1.0, 3.4, 0.5], [0.0, 3.0, 1.3, 0.0]])
      >>> layer.bin_boundaries
      [0.0, 0.5, 1.2999999523162842]

    Source: `keras.layers.Discretization`.
    """

    def __init__(
        self, bin_boundaries: ArrayLike | None = None, num_bins: int | None = None, epsilon: float = 0.01,
        output_mode: str = "int", sparse: bool = False, dtype: DTypeLike | None = None, name: str | None = None,
    ):
        super().__init__(name)
        refuse_sparse(sparse)
        if (bin_boundaries is None) == (num_bins is None):
            raise ValueError("Exactly one of `bin_boundaries` and `num_bins` must be given. Received: "
                             f"{'none' if num_bins is None else 'both'}.")
        arguments.require({"epsilon": epsilon}, "a number between 0 and 1", lambda number: 0 < number < 1)
        self.num_bins = None if num_bins is None else arguments.as_count("num_bins", num_bins)
        self.epsilon = float(epsilon)
        self.output_mode = arguments.check_word("output_mode", output_mode, ("int", *ENCODINGS))
        # Keras writes 'int32' for indices, and floats for encodings.
        self.dtype = as_float_dtype(None if output_mode == "int" else dtype)
        self.bin_boundaries: list[float] | None = None
        if bin_boundaries is not None:
            self._set_boundaries(arguments.as_numbers("bin_boundaries", bin_boundaries))
        self.reset_state()

    @property
    def is_adaptable(self) -> bool:
        return self.num_bins is not None

    def reset_state(self) -> None:
        self._summary = np.zeros((2, 0), np.float32)

    def update_state(self, data: np.ndarray) -> None:
        check_numbers("Discretization", data)
        values = data.astype(np.float32)
        unusable = int(np.isnan(values).sum())
        if unusable:
            raise missing_values("Discretization.adapt", unusable, values.size, "They have no quantile. Fill them in "
                                 "data frames by `fillna`, or drop the rows.")
        if values.size:
            summary = _summary_of(values, self.epsilon)
            self._summary = _merged(summary, self._summary, self.epsilon)

    def finalize_state(self) -> None:
        assert self.num_bins is not None
        if not self._summary.size:
            raise DataError("Discretization.adapt needs at least one value. Received: none.")
        self._set_boundaries(_compressed(self._summary, 1.0 / self.num_bins)[0, :-1])

    def _set_boundaries(self, boundaries: np.ndarray) -> None:
        if boundaries.ndim != 1 or np.isnan(boundaries).any() or (np.diff(boundaries) < 0).any():
            raise ValueError("`bin_boundaries` must be a list of numbers in increasing order. Received: "
                             f"{describe(boundaries)}.")
        self.bin_boundaries = boundaries.tolist()
        self._boundaries = boundaries.astype(np.float32)

    def __call__(self, inputs: ArrayLike) -> Array:
        """Returns the indices of bins, or their encoding.

        Raises:
          ValueError: before `adapt`, or if `inputs` are not numbers.
        """
        if self.bin_boundaries is None:
            raise ValueError("Discretization has no bins: call `adapt(data)`, or give `bin_boundaries`.")
        array = inputs if isinstance(inputs, jax.Array) else host_array(inputs)
        check_numbers("Discretization", array)
        self._mark(array)
        search = jnp.searchsorted if isinstance(array, jax.Array) else np.searchsorted
        indices = search(self._boundaries, array.astype(np.float32), side="right").astype(np.int32)
        dtype = np.dtype(np.int32) if self.output_mode == "int" else self.dtype
        return encode(indices, self.output_mode, len(self.bin_boundaries) + 1, dtype)

    def get_config(self) -> Config:
        return {"bin_boundaries": self.bin_boundaries, "num_bins": self.num_bins, "epsilon": self.epsilon,
                "output_mode": self.output_mode, "name": self.name, "dtype": self.dtype.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the layer of a configuration, which has both `num_bins` and boundaries if the layer was adapted."""
        boundaries: Sequence[float] | None = config.get("bin_boundaries")
        if boundaries is None or config.get("num_bins") is None:
            return super().from_config(config)
        layer = super().from_config({**config, "bin_boundaries": None})
        layer._set_boundaries(np.asarray(boundaries, np.float64))
        return layer


# Keras's approximation of quantiles: a summary has values, and how many values of the data each stands for.


def _summary_of(values: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns evenly spaced values of the sorted data, and their weights, of shape `(2, n)`."""
    ordered = np.sort(values, axis=None)
    step = max(ordered.size * epsilon, 1)
    boundaries = ordered[int(step - 1)::int(step)]
    return np.stack([boundaries, np.ones_like(boundaries) * step])


def _merged(summary: np.ndarray, other: np.ndarray, epsilon: float) -> np.ndarray:
    both = np.concatenate([summary, other], axis=1)
    return _compressed(both[:, np.argsort(both[0])], epsilon)


def _compressed(summary: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns a summary with `1 / epsilon` values, interpolated from a larger summary."""
    if summary.shape[1] * epsilon < 1:
        return summary
    shares = epsilon + np.arange(0.0, 1.0, epsilon)
    totals = summary[1].cumsum()
    share_of_totals = totals / totals[-1]
    values = np.interp(shares, share_of_totals, summary[0])
    totals = np.interp(shares, share_of_totals, totals)
    weights = totals - np.concatenate([[0], totals[:-1]])
    return np.stack([values, weights]).astype(np.float32)
