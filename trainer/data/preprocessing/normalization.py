"""Normalization: numbers with a mean of 0 and a variance of 1."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import describe
from trainer.data.preprocessing.batches import chunks, host_array, missing_values
from trainer.data.preprocessing.layer import AdaptableLayer, Array, as_float_dtype, check_numbers
from trainer.data.sources.arrays import DataError

_EPSILON = 1e-7  # Keras's smallest standard deviation


class Normalization(AdaptableLayer):
    """Computes `(inputs - mean) / sqrt(variance)`, on the host or in a module.

    The mean and the variance are computed by `adapt`, or given. In a module they are constants of its program, and
    part of `Model.export`.

    Args:
      axis: the axis or axes with a separate mean and variance for each index, such as the axis of features in `(rows,
        features)`. None for a single mean and variance of all numbers.
      mean: the mean; given together with `variance`.
      variance: the variance, of the same shape as `mean`: a number, or a number for each feature.
      invert: whether to compute `inputs * sqrt(variance) + mean`.
      name: name of the layer.
      dtype: dtype of the result; by default float32.

    Attributes:
      mean: the mean, float32 with the sizes of the axes as its shape; None before `adapt`.
      variance: the variance.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if only one of `mean` and `variance` is given, or their shapes differ.

    Example:
      >>> normalization = Normalization()
      >>> normalization.adapt([[0.0, 7.0], [2.0, 9.0], [0.0, 7.0], [2.0, 9.0]])
      >>> normalization([[1.0, 10.0]]).tolist()
      [[0.0, 2.0]]

    Source: `keras.layers.Normalization`.
    """

    def __init__(
        self, axis: int | Sequence[int] | None = -1, mean: ArrayLike | None = None, variance: ArrayLike | None = None,
        invert: bool = False, *, name: str | None = None, dtype: DTypeLike | None = None,
    ):
        super().__init__(name)
        axes = () if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
        self.axis = tuple(arguments.as_count("axis", each, -32, "a whole number, several, or None") for each in axes)
        arguments.require_bool(invert=invert)
        self.invert, self.dtype = bool(invert), as_float_dtype(dtype)
        self.mean: np.ndarray | None = None
        self.variance: np.ndarray | None = None
        self._is_given = mean is not None
        if (mean is None) != (variance is None):
            raise ValueError("`mean` and `variance` must be given together. Received: only "
                             f"{'`variance`' if mean is None else '`mean`'}.")
        if mean is not None:
            self.mean = arguments.as_numbers("mean", mean).astype(np.float32)
            self.variance = arguments.as_numbers("variance", variance).astype(np.float32)
            if self.mean.shape != self.variance.shape or self.mean.ndim > len(self.axis):
                raise ValueError("`mean` and `variance` must have one shape, with at most as many axes as `axis` has. "
                                 f"Received: {describe(self.mean)} and {describe(self.variance)}, with axis={axis}.")
        self.reset_state()

    @property
    def is_adaptable(self) -> bool:
        return not self._is_given

    def reset_state(self) -> None:
        self._count, self._sizes = 0, ()
        self._sum_of_means = self._sum_of_squares = np.zeros(())

    def update_state(self, data: np.ndarray) -> None:
        check_numbers("Normalization", data)
        kept = self._kept_axes(data.ndim)
        if data.ndim == 1 and kept:
            raise DataError(f"Normalization has axis={self.axis}, and the data have only the axis of rows: "
                            f"{describe(data)}. Give them an axis of features, `x[:, None]`, or make a "
                            "`Normalization(axis=None)`.")
        sizes = tuple(data.shape[axis] for axis in kept)
        if self._count and sizes != self._sizes:
            raise DataError(f"Normalization has one mean for each place of axis={self.axis}, and all batches must have "
                            f"the same sizes there. Received: {describe(data)} after batches of sizes {self._sizes}.")
        self._sizes = sizes
        reduced = tuple(axis for axis in range(data.ndim) if axis not in kept)
        for part in chunks(data) if 0 in reduced else [data]:
            values = np.asarray(part, np.float64)
            unusable = int(values.size - np.isfinite(values).sum())
            if unusable:
                raise missing_values("Normalization.adapt", unusable, values.size, "Its mean would be NaN, too. Fill "
                                     "them in data frames by `fillna`, or drop the rows.")
            if values.size:
                count = values.size // max(1, int(np.prod(sizes)))
                self._merge(count, values.mean(reduced), values.var(reduced) * count)

    def _merge(self, count: int, mean: np.ndarray, squares: np.ndarray) -> None:
        """Adds the mean, and the sum of squared distances from it, of some more numbers."""
        total = self._count + count
        distance = mean - self._sum_of_means
        self._sum_of_means = self._sum_of_means + distance * (count / total)
        self._sum_of_squares = self._sum_of_squares + squares + distance**2 * (self._count * count / total)
        self._count = total

    def finalize_state(self) -> None:
        if not self._count:
            raise DataError("Normalization.adapt needs at least one row. Received: none.")
        self.mean = self._sum_of_means.astype(np.float32)
        self.variance = (self._sum_of_squares / self._count).astype(np.float32)

    def __call__(self, inputs: ArrayLike) -> Array:
        """Returns the normalized numbers, of the shape of `inputs`.

        Raises:
          ValueError: before `adapt`, or if `inputs` are not numbers, or have other features.
        """
        if self.mean is None or self.variance is None:
            raise ValueError("Normalization has no mean: call `adapt(data)`, or give `mean` and `variance`.")
        array = inputs if isinstance(inputs, jax.Array) else host_array(inputs)
        check_numbers("Normalization", array)
        self._mark(array)
        mean = self._broadcast(self.mean, array).astype(self.dtype)
        variance = self._broadcast(self.variance, array).astype(self.dtype)
        # As numbers of the host, so that a program computes with the same bits.
        deviation = np.maximum(np.sqrt(variance), self.dtype.type(_EPSILON))
        array = array.astype(self.dtype)
        return array * deviation + mean if self.invert else (array - mean) / deviation

    def _broadcast(self, statistic: np.ndarray, inputs: Array) -> np.ndarray:
        """Returns a statistic in a shape that broadcasts to the inputs."""
        if statistic.ndim == 0:
            return statistic
        kept = self._kept_axes(inputs.ndim)[-statistic.ndim:]
        shape = [1] * inputs.ndim
        for axis, size in zip(kept, statistic.shape, strict=True):
            if size not in (1, inputs.shape[axis]):
                raise DataError(f"Normalization has {size} means along axis {axis}. Received: {describe(inputs)}. "
                                "Adapt it to data of this shape.")
            shape[axis] = size
        return statistic.reshape(shape)

    def _kept_axes(self, axes: int) -> tuple[int, ...]:
        if any(not -axes <= axis < axes for axis in self.axis):
            raise DataError(f"Normalization has axis={self.axis}, and the inputs have {axes} axes. Use axis=None for "
                            "one mean over all numbers, or give the inputs an axis of features.")
        return tuple(sorted(axis % axes for axis in self.axis))

    def get_config(self) -> Config:
        return {"axis": list(self.axis), "mean": None if self.mean is None else self.mean.tolist(),
                "variance": None if self.variance is None else self.variance.tolist(), "invert": self.invert,
                "name": self.name, "dtype": self.dtype.name}
