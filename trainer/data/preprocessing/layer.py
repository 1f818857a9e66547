"""The base classes of preprocessing layers: configurations, files, and `adapt`."""

from __future__ import annotations

import abc
import json
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.categories.vocabularies import is_missing
from trainer.core.configs import Config, to_config
from trainer.core.errors import describe
from trainer.core.files import replace_file, storage
from trainer.data.preprocessing.batches import FILL, batches_of, missing_values, whole_array
from trainer.data.sources.arrays import DataError

Array = np.ndarray | jax.Array

FORMAT_VERSION = 1
SUFFIX = ".json"


class PreprocessingLayer(abc.ABC):
    """A function of a batch whose arguments, statistics and vocabulary are plain data.

    Args:
      name: name of the layer; by default its class's name in snake case, such as "string_lookup".

    Attributes:
      name: name of the layer.
    """

    _ignored: ClassVar[tuple[str, ...]] = ("trainable",)  # entries of configurations that only Keras writes
    holds_only_constants = True  # so that a stack of layers takes it as a function: nothing in it is trained

    def __init__(self, name: str | None = None):
        if name is not None:
            arguments.require_text(name=name)
        self.name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        self._is_in_program = False

    @abc.abstractmethod
    def get_config(self) -> Config:
        """Returns the arguments, statistics and vocabulary as plain data, for `from_config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the layer for the result of `get_config`, of this class or of Keras's layer."""
        config = {name: value for name, value in config.items() if name not in cls._ignored}
        if isinstance(config.get("dtype"), Mapping):  # Keras's policy
            config["dtype"] = config["dtype"]["config"]["name"]
        return cls(**config)

    def save(self, filepath: str | os.PathLike[str]) -> None:
        """Writes the layer with its statistics and vocabulary to a JSON file, which `preprocessing.load` reads.

        Args:
          filepath: path of the file, which ends with ".json". An existing file is replaced.

        Raises:
          TypeError: if `filepath` is not a path.
          ValueError: if it has another suffix.
          OSError: if the file cannot be written.
        """
        path = storage.as_place("filepath", filepath, "a path, such as 'preprocessing.json'")
        if not path.endswith(SUFFIX):
            raise ValueError(f"`filepath` must end with {SUFFIX!r}: a preprocessing layer is written as JSON. "
                             f"Received: {path!r}. Write {os.path.splitext(path)[0] + SUFFIX!r}.")
        text = json.dumps({"format_version": FORMAT_VERSION, "layer": to_config(self, "data.preprocessing")})
        replace_file(path, text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def _mark(self, inputs: object) -> None:
        """Notes that a program is being made with the layer's constants, if `inputs` is traced."""
        self._is_in_program = self._is_in_program or isinstance(inputs, jax.core.Tracer)

    def _check_may_change(self) -> None:
        """Raises RuntimeError after a compiled program has taken the statistics or the vocabulary as constants."""
        if self._is_in_program:
            raise RuntimeError(f"{type(self).__name__} {self.name!r} cannot change any more: a compiled step holds its "
                               "statistics or vocabulary as constants. Adapt the layer before the first `fit`, or make "
                               "a new layer, and a new model with it.")


class AdaptableLayer(PreprocessingLayer):
    """A layer with a state that `adapt` computes from data."""

    def adapt(self, data: object, *, steps: int | None = None) -> None:
        """Computes the layer's state from data, on the host, in place of an earlier state.

        Data other than arrays are read batch by batch, so that they need not fit into memory.

        Args:
          data: an array, a list of values, or a column of a data frame; a `trainer.data.Dataset`; or an iterable of
            batches, such as a list of arrays, a generator, a `DataLoader` or a `tf.data.Dataset`. Of a batch `(x, y)`
            or `(x, y, sample_weight)`, only `x` is used.
          steps: number of batches to read; by default all. Required for endless data.

        Raises:
          TypeError: if `data` is of another kind.
          ValueError: if the data have no values, unusable values, or missing values that the layer refuses.
          RuntimeError: if a compiled program holds the state as constants.
        """
        self._check_may_change()
        self._check_adaptable()
        self.reset_state()
        whole = whole_array(data)
        if whole is None:
            for batch in batches_of(data, steps, type(self).__name__):
                self.update_state(batch)
        elif steps is not None:
            raise ValueError("`steps` is the number of batches, and arrays have none. Received: "
                             f"{describe(whole)} and steps={steps}.")
        else:
            self._update_with_whole(whole)
        self.finalize_state()

    @abc.abstractmethod
    def reset_state(self) -> None:
        """Forgets the data that were read so far."""

    @abc.abstractmethod
    def update_state(self, data: np.ndarray) -> None:
        """Reads a batch; `finalize_state` computes the state from all batches since `reset_state`."""

    @abc.abstractmethod
    def finalize_state(self) -> None:
        """Computes the state from the batches that were read."""

    @property
    @abc.abstractmethod
    def is_adaptable(self) -> bool:
        """Whether `adapt` may be called: the state was not given to the constructor."""

    def _check_adaptable(self) -> None:
        if not self.is_adaptable:
            raise ValueError(f"{type(self).__name__} {self.name!r} cannot be adapted: its state was given, or loaded "
                             "from a file. Make a layer without it to adapt.")

    def _update_with_whole(self, array: np.ndarray) -> None:
        self.update_state(array)


def as_float_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Returns the dtype of a layer's numbers, by default float32.

    Raises:
      TypeError: if `dtype` is not a dtype.
      ValueError: if it is not a dtype of real numbers.
    """
    found = arguments.as_dtype("dtype", "float32" if dtype is None else dtype)
    if not jax.numpy.issubdtype(found, jax.numpy.floating):
        raise ValueError(f"`dtype` must be a type of real numbers, such as 'float32'. Received: {found}.")
    return found


def refuse_sparse(sparse: bool) -> None:
    """Raises ValueError for Keras's `sparse=True`."""
    if sparse:
        raise ValueError("`sparse=True` is not supported: JAX's programs take dense arrays. Use output_mode='int' on "
                         "the host, and `nn.Embed` or `CategoryEncoding` in the model.")


def check_numbers(owner: str, inputs: Array) -> None:
    """Raises DataError unless an array is of numbers."""
    if inputs.dtype == object and (absent := sum(map(is_missing, np.ravel(inputs)))):
        raise missing_values(owner, absent, inputs.size, FILL)
    if not (inputs.dtype == bool or jax.numpy.issubdtype(inputs.dtype, jax.numpy.number)):
        raise DataError(f"{owner} takes numbers. Received: {describe(inputs)}. Text becomes numbers by "
                        "`StringLookup`, `Hashing` or `TextVectorization`; dates by pandas' `dt.month` and the like.")
