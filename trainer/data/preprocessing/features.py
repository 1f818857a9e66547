"""Kinds of features of a table, and crosses of features, for `FeatureSpace`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import wrong_type
from trainer.data.preprocessing.category_encoding import CategoryEncoding
from trainer.data.preprocessing.discretization import Discretization
from trainer.data.preprocessing.hashed_crossing import HashedCrossing
from trainer.data.preprocessing.hashing import Hashing
from trainer.data.preprocessing.index_lookup import IndexLookup
from trainer.data.preprocessing.layer import PreprocessingLayer
from trainer.data.preprocessing.registry import LAYERS

_MODES = ("int", "one_hot", "float")


@dataclasses.dataclass(frozen=True)
class Feature:
    """A column of a table and its layer; the methods of `FeatureSpace`, such as `float_normalized`, make it.

    Attributes:
      dtype: "float32", "int32" or "string".
      preprocessor: the layer, called with a column of shape `(rows, 1)`.
      output_mode: "float" for the layer's numbers, also multi-hot vectors and counts; "int" for its indices; "one_hot"
        for a vector per row, with an entry for each possible index.

    Raises:
      TypeError: if `preprocessor` is not a layer.
      ValueError: if another argument is unknown.
    """

    dtype: str
    preprocessor: PreprocessingLayer
    output_mode: str

    def __post_init__(self) -> None:
        arguments.check_word("dtype", self.dtype, ("float32", "int32", "int64", "string"))
        arguments.check_word("output_mode", self.output_mode, _MODES)
        if not isinstance(self.preprocessor, PreprocessingLayer):
            raise wrong_type("preprocessor", self.preprocessor, "a layer of `trainer.data.preprocessing`")

    def get_config(self) -> Config:
        """Returns the feature as plain data."""
        return {"dtype": self.dtype, "preprocessor": LAYERS.serialize(self.preprocessor),
                "output_mode": self.output_mode}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Feature:
        """Returns the feature for the result of `get_config`."""
        return cls(config["dtype"], LAYERS.deserialize(config["preprocessor"]), config["output_mode"])


@dataclasses.dataclass(frozen=True)
class Cross:
    """Several features whose combinations are hashed; `FeatureSpace.cross` makes it.

    Attributes:
      feature_names: names of at least two features that have indices.
      crossing_dim: number of bins.
      output_mode: "one_hot" or "int".

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if there are fewer than two names, or `output_mode` is unknown.
    """

    feature_names: tuple[str, ...]
    crossing_dim: int
    output_mode: str = "one_hot"

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_names", tuple(arguments.as_names("feature_names", self.feature_names)))
        arguments.as_count("crossing_dim", self.crossing_dim)
        arguments.check_word("output_mode", self.output_mode, ("int", "one_hot"))
        if len(self.feature_names) < 2:
            raise ValueError(f"A cross must have at least two features. Received: {len(self.feature_names)}.")

    @property
    def name(self) -> str:
        """The names of the features, joined by `_X_`."""
        return "_X_".join(self.feature_names)

    def get_config(self) -> Config:
        """Returns the cross as plain data."""
        return {"feature_names": list(self.feature_names), "crossing_dim": self.crossing_dim,
                "output_mode": self.output_mode}


def encoder_of(name: str, layer: PreprocessingLayer, output_mode: str) -> CategoryEncoding | None:
    """Returns the layer that makes vectors of a feature's indices, for `output_mode="one_hot"`.

    Raises:
      ValueError: if the feature has no indices, or their number is not known.
    """
    if output_mode != "one_hot":
        return None
    categories = _num_categories(layer)
    if categories is not None:
        return CategoryEncoding(categories, "multi_hot")
    fix = "Give the feature output_mode='float'."
    if getattr(layer, "output_mode", None) == "int":
        fix = f"{_vectors_of(layer)} and the feature output_mode='float'."
    raise ValueError(f"Feature {name!r} has output_mode='one_hot', and {type(layer).__name__} does not return one "
                     f"index of a known number of categories. {fix}")


def check_is_part_of_vector(name: str, layer: PreprocessingLayer, values: np.ndarray) -> None:
    """Raises ValueError for a feature of indices or text, which mean nothing as a part of one array of numbers.

    Args:
      name: name of the feature.
      layer: its layer.
      values: its encoded values.
    """
    if values.dtype.kind == "f" or getattr(layer, "output_mode", "int") != "int":  # multi-hot vectors may be integers
        return
    fix = ""
    if _num_categories(layer) is not None:
        fix = "Give the feature output_mode='one_hot', or "
    elif hasattr(layer, "output_mode"):
        fix = f"{_vectors_of(layer)} or "
    fix += "use `FeatureSpace(..., output_mode=\"dict\")`."
    raise ValueError(f"Feature {name!r} has indices, and cannot be a part of one array of numbers. "
                     f"{fix[0].upper()}{fix[1:]}")


def _vectors_of(layer: PreprocessingLayer) -> str:
    return f"Give the {type(layer).__name__} output_mode='multi_hot', for a vector per row,"


def _num_categories(layer: PreprocessingLayer) -> int | None:
    """Returns the number of indices of a layer that returns an index for each value; None for other layers."""
    if getattr(layer, "output_mode", None) != "int":
        return None
    if isinstance(layer, IndexLookup):
        return layer.vocabulary_size()
    if isinstance(layer, Discretization):
        return layer.num_bins or len(layer.bin_boundaries or []) + 1
    return layer.num_bins if isinstance(layer, (Hashing, HashedCrossing)) else None
