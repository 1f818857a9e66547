"""The preprocessing layers by name, to make them of configurations."""

from __future__ import annotations

from trainer.core.registry import Registry
from trainer.data.preprocessing.category_encoding import CategoryEncoding
from trainer.data.preprocessing.discretization import Discretization
from trainer.data.preprocessing.hashed_crossing import HashedCrossing
from trainer.data.preprocessing.hashing import Hashing
from trainer.data.preprocessing.integer_lookup import IntegerLookup
from trainer.data.preprocessing.layer import PreprocessingLayer
from trainer.data.preprocessing.normalization import Normalization
from trainer.data.preprocessing.rescaling import Rescaling
from trainer.data.preprocessing.string_lookup import StringLookup
from trainer.data.preprocessing.text_vectorization import TextVectorization

CLASSES = (CategoryEncoding, Discretization, HashedCrossing, Hashing, IntegerLookup, Normalization, Rescaling,
           StringLookup, TextVectorization)

LAYERS: Registry[PreprocessingLayer] = Registry(
    "preprocessing layer", PreprocessingLayer, "data.preprocessing", {cls.__name__: cls for cls in CLASSES},
    expected="a layer of `trainer.data.preprocessing`")
