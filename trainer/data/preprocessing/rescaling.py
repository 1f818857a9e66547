"""Rescaling: a linear function of numbers."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.data.preprocessing.batches import host_array
from trainer.data.preprocessing.layer import Array, PreprocessingLayer, as_float_dtype, check_numbers


class Rescaling(PreprocessingLayer):
    """Computes `inputs * scale + offset`, on the host or in a module.

    Args:
      scale: a number, or numbers that broadcast to the inputs.
      offset: the same.
      name: name of the layer.
      dtype: dtype of the result; by default float32.

    Raises:
      TypeError: if `scale` or `offset` is not numbers.

    Example:
      >>> Rescaling(1 / 4, offset=-1.0)([0, 2, 8]).tolist()
      [-1.0, -0.5, 1.0]

    Source: `keras.layers.Rescaling`.
    """

    def __init__(self, scale: ArrayLike, offset: ArrayLike = 0.0, *, name: str | None = None,
                 dtype: DTypeLike | None = None):
        super().__init__(name)
        self.dtype = as_float_dtype(dtype)
        self.scale, self.offset = (arguments.as_numbers(argument, value).astype(self.dtype) for argument, value in (
            ("scale", scale), ("offset", offset)))

    def __call__(self, inputs: ArrayLike) -> Array:
        """Returns the rescaled numbers, of the shape of `inputs`."""
        array = inputs if isinstance(inputs, jax.Array) else host_array(inputs)
        check_numbers("Rescaling", array)
        return array.astype(self.dtype) * self.scale + self.offset

    def get_config(self) -> Config:
        return {"scale": self.scale.tolist(), "offset": self.offset.tolist(), "name": self.name,
                "dtype": self.dtype.name}
