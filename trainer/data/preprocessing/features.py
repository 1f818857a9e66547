"""Kinds of features of a table, and crosses of features, for `FeatureSpace`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
      output_mode: "float" for the layer's numbers; "int" for its indices; "one_hot" for a vector per row, with an entry
        for each possible index.

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
    if getattr(layer, "output_mode", None) == "int":
        if isinstance(layer, IndexLookup):
            return CategoryEncoding(layer.vocabulary_size(), "multi_hot")
        if isinstance(layer, Discretization):
            return CategoryEncoding(layer.num_bins or len(layer.bin_boundaries or []) + 1, "multi_hot")
        if isinstance(layer, (Hashing, HashedCrossing)):
            return CategoryEncoding(layer.num_bins, "multi_hot")
    raise ValueError(f"Feature {name!r} has output_mode='one_hot', and {type(layer).__name__} returns no indices of a "
                     "known number. Use output_mode='float' or 'int'.")
