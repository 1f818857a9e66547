"""FeatureSpace: the columns of a table to the input of a model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import describe, near_hint, unknown_name, wrong_type
from trainer.data.preprocessing.batches import FILL, inputs_of, missing_values
from trainer.data.preprocessing.discretization import Discretization
from trainer.data.preprocessing.features import Cross, Feature, check_is_part_of_vector, encoder_of
from trainer.data.preprocessing.hashed_crossing import HashedCrossing
from trainer.data.preprocessing.hashing import Hashing, on_host
from trainer.data.preprocessing.integer_lookup import IntegerLookup
from trainer.data.preprocessing.layer import AdaptableLayer, PreprocessingLayer
from trainer.data.preprocessing.normalization import Normalization
from trainer.data.preprocessing.rescaling import Rescaling
from trainer.data.preprocessing.string_lookup import StringLookup
from trainer.data.sources.arrays import DataError, check_rows

_ROWS = 32  # that Keras reads at a time, of columns: the bins of `Discretization` depend on it


class FeatureSpace(PreprocessingLayer):
    """Encodes the columns of a table, on the host: a vector for each row, or a dict of encoded columns.

    Kinds of features, each also a method with arguments: "float", "float_rescaled", "float_normalized",
    "float_discretized", "integer_categorical", "string_categorical", "integer_hashed", "string_hashed".

    Args:
      features: the kind of each column by its name: a string, or the result of a method, such as
        `FeatureSpace.string_categorical(max_tokens=10)`. `FeatureSpace.feature` takes any preprocessing layer.
      output_mode: "concat" for one float32 array of shape `(rows, width)`: the features in alphabetical order, then the
        crosses; "dict" for an array per name.
      crosses: tuples of names of features whose combinations are hashed, or results of `FeatureSpace.cross`.
      crossing_dim: default number of bins of a cross.
      hashing_dim: number of bins of "integer_hashed" and "string_hashed".
      num_discretization_bins: number of bins of "float_discretized".
      name: name of the layer.

    Attributes:
      features: the features by name.
      preprocessors: their layers by name.
      crossers: the layers of the crosses by name, such as "color_X_size".
      output_mode: "concat" or "dict".

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if there are no features, or a kind, a name in a cross or `output_mode` is unknown.

    Example:
      >>> space = FeatureSpace({"age": "float_normalized", "color": "string_categorical"})
      >>> table = {"age": [10.0, 30.0], "color": ["red", "blue"]}
      >>> space.adapt(table)
      >>> space(table).tolist()
      [[-1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]]

    Source: `keras.utils.FeatureSpace`.
    """

    def __init__(
        self, features: Mapping[str, str | Feature], output_mode: str = "concat",
        crosses: Sequence[Sequence[str] | Cross] | None = None, crossing_dim: int = 32, hashing_dim: int = 32,
        num_discretization_bins: int = 32, name: str | None = None,
    ):
        super().__init__(name)
        if not isinstance(features, Mapping):
            raise wrong_type("features", features, "a dict of kinds of features by name of the column")
        if not features:
            raise ValueError("`features` must have at least one feature. Received: an empty dict.")
        self.output_mode = arguments.check_word("output_mode", output_mode, ("concat", "dict"))
        self.crossing_dim = arguments.as_count("crossing_dim", crossing_dim)
        self.hashing_dim = arguments.as_count("hashing_dim", hashing_dim)
        self.num_discretization_bins = arguments.as_count("num_discretization_bins", num_discretization_bins)
        self.features = {column: self._feature(column, feature) for column, feature in features.items()}
        self.crosses = [cross if isinstance(cross, Cross) else Cross(tuple(cross), self.crossing_dim)
                        for cross in crosses or ()]
        for column in itertools.chain.from_iterable(cross.feature_names for cross in self.crosses):
            if column not in self.features:
                raise unknown_name("feature in `crosses`", column, self.features)
        self.preprocessors = {column: feature.preprocessor for column, feature in self.features.items()}
        self.crossers = {cross.name: HashedCrossing(cross.crossing_dim, name=cross.name) for cross in self.crosses}

    def _feature(self, column: str, feature: object) -> Feature:
        if isinstance(feature, Feature):
            return feature
        if not isinstance(feature, str):
            raise wrong_type(f"features[{column!r}]", feature, "the name of a kind, such as 'float_normalized', or a "
                             "feature, such as `FeatureSpace.float_normalized()`")
        kinds = {
            "float": lambda: self.float(column), "float_normalized": lambda: self.float_normalized(column),
            "float_rescaled": lambda: self.float_rescaled(name=column),
            "float_discretized": lambda: self.float_discretized(self.num_discretization_bins, name=column),
            "integer_categorical": lambda: self.integer_categorical(name=column),
            "string_categorical": lambda: self.string_categorical(name=column),
            "integer_hashed": lambda: self.integer_hashed(self.hashing_dim, name=column),
            "string_hashed": lambda: self.string_hashed(self.hashing_dim, name=column)}
        if feature not in kinds:
            raise unknown_name(f"kind of feature {column!r}", feature, kinds)
        return kinds[feature]()

    # --- kinds of features -------------------------------------------------------------------------------------------

    @staticmethod
    def cross(feature_names: Sequence[str], crossing_dim: int, output_mode: str = "one_hot") -> Cross:
        """Returns a cross of features, whose combinations are hashed into `crossing_dim` bins."""
        return Cross(tuple(feature_names), crossing_dim, output_mode)

    @staticmethod
    def feature(dtype: str, preprocessor: PreprocessingLayer, output_mode: str) -> Feature:
        """Returns a feature with a layer of your choice; see `Feature`."""
        return Feature(dtype, preprocessor, output_mode)

    @classmethod
    def float(cls, name: str | None = None) -> Feature:
        """Returns a feature of numbers as they are."""
        return Feature("float32", Rescaling(1.0, name=_name(name, "float")), "float")

    @classmethod
    def float_rescaled(cls, scale: ArrayLike = 1.0, offset: ArrayLike = 0.0, name: str | None = None) -> Feature:
        """Returns a feature of numbers times `scale`, plus `offset`."""
        return Feature("float32", Rescaling(scale, offset, name=_name(name, "float_rescaled")), "float")

    @classmethod
    def float_normalized(cls, name: str | None = None) -> Feature:
        """Returns a feature of numbers with a mean of 0 and a variance of 1; see `Normalization`."""
        return Feature("float32", Normalization(name=_name(name, "float_normalized")), "float")

    @classmethod
    def float_discretized(
        cls, num_bins: int | None = None, bin_boundaries: ArrayLike | None = None, output_mode: str = "one_hot",
        name: str | None = None,
    ) -> Feature:
        """Returns a feature of numbers in bins; see `Discretization`."""
        layer = Discretization(bin_boundaries, num_bins, name=_name(name, "float_discretized"))
        return Feature("float32", layer, output_mode)

    @classmethod
    def integer_categorical(
        cls, max_tokens: int | None = None, num_oov_indices: int = 1, output_mode: str = "one_hot",
        name: str | None = None,
    ) -> Feature:
        """Returns a feature of integers with a vocabulary; see `IntegerLookup`."""
        layer = IntegerLookup(max_tokens, num_oov_indices, name=_name(name, "integer_categorical"))
        return Feature("int32", layer, output_mode)

    @classmethod
    def string_categorical(
        cls, max_tokens: int | None = None, num_oov_indices: int = 1, output_mode: str = "one_hot",
        name: str | None = None,
    ) -> Feature:
        """Returns a feature of strings with a vocabulary; see `StringLookup`."""
        layer = StringLookup(max_tokens, num_oov_indices, name=_name(name, "string_categorical"))
        return Feature("string", layer, output_mode)

    @classmethod
    def string_hashed(cls, num_bins: int, output_mode: str = "one_hot", name: str | None = None) -> Feature:
        """Returns a feature of hashed strings; see `Hashing`."""
        return Feature("string", Hashing(num_bins, name=_name(name, "string_hashed")), output_mode)

    @classmethod
    def integer_hashed(cls, num_bins: int, output_mode: str = "one_hot", name: str | None = None) -> Feature:
        """Returns a feature of hashed integers; see `Hashing`."""
        return Feature("int32", Hashing(num_bins, name=_name(name, "integer_hashed")), output_mode)

    # --- adapt -------------------------------------------------------------------------------------------------------

    def adapt(self, dataset: object, *, steps: int | None = None) -> None:
        """Computes the statistics and vocabularies of all features in one pass over the data, on the host.

        Args:
          dataset: a dict of columns, or a data frame; or a `Dataset`, or an iterable, of batches that are dicts of
            columns, or `(x, y)` with such a dict. Other columns are ignored.
          steps: number of batches to read; by default all of them.

        Raises:
          TypeError: if `dataset` is of another kind.
          ValueError: if a feature is missing, or a column has values that its layer refuses; the message names it.
        """
        adapted = {column: layer for column, layer in self.preprocessors.items()
                   if isinstance(layer, AdaptableLayer) and layer.is_adaptable}
        for layer in adapted.values():
            layer.reset_state()
        for table in self._tables(dataset, steps):
            for column, layer in adapted.items():
                with _naming_feature(column):
                    layer.update_state(_with_axis(table[column]))
        for column, layer in adapted.items():
            with _naming_feature(column):
                layer.finalize_state()

    def _tables(self, dataset: object, steps: int | None) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of columns."""
        if not _is_table(dataset):
            for batch in inputs_of(dataset, steps):
                if not _is_table(batch):
                    raise DataError("`FeatureSpace.adapt` takes batches that are dicts of columns. Received: "
                                    f"{describe(batch)}.")
                yield self._columns(batch)
            return
        columns = self._columns(dataset)
        rows = check_rows(columns)
        for start in range(0, rows, _ROWS):
            yield {column: values[start:start + _ROWS] for column, values in columns.items()}

    def _columns(self, table: Any) -> dict[str, np.ndarray]:
        """Returns the columns of a table that are features."""
        names = _names_of(table)
        missing = [column for column in self.features if column not in names]
        if missing:
            raise DataError(f"The data have no column {missing[0]!r}, which is a feature. "
                            f"{near_hint(missing[0], map(str, names))}")
        return {column: on_host("FeatureSpace", table[column]) for column in self.features}

    # --- calls -------------------------------------------------------------------------------------------------------

    def __call__(self, data: Any) -> np.ndarray | dict[str, np.ndarray]:
        """Returns the encoded features.

        Args:
          data: a dict of columns of shape `(rows,)` or `(rows, 1)`, or a data frame; or a dict of the values of one
            row, whose result has no axis of rows.

        Returns:
          A float32 array of shape `(rows, width)`, or for `output_mode="dict"` an array for each feature and cross.

        Raises:
          TypeError: if `data` is not a table, or is traced by JAX.
          ValueError: before `adapt`; if a feature is missing, or a column is not a feature or has values that its layer
            refuses, or missing numbers; the message names it.
        """
        if not _is_table(data):
            raise wrong_type("data", data, "a dict of columns, or a data frame")
        columns = self._columns(data)
        others = [column for column in _names_of(data) if column not in self.features]
        if others:
            raise DataError(f"The data have a column {others[0]!r}, which is no feature. "
                            f"{near_hint(str(others[0]), self.features)} Select the features before: `data[list("
                            "space.features)]`.")
        is_row = all(values.ndim == 0 for values in columns.values())
        if not is_row:
            check_rows(columns)
        found: dict[str, np.ndarray] = {}
        for column, layer in self.preprocessors.items():
            with _naming_feature(column):
                values = found[column] = np.asarray(layer(_with_axis(columns[column])))  # type: ignore[operator]
                if values.dtype.kind == "f" and (absent := int(np.isnan(values).sum())):
                    raise missing_values(type(layer).__name__, absent, values.size, FILL)
        crossed = {name: crosser([found[column] for column in cross.feature_names])
                   for cross, (name, crosser) in zip(self.crosses, self.crossers.items(), strict=True)}
        modes = {cross.name: cross.output_mode for cross in self.crosses}
        results = {column: _encoded(column, self.preprocessors[column], self.features[column].output_mode, values)
                   for column, values in sorted(found.items())}
        results |= {name: _encoded(name, self.crossers[name], modes[name], values)
                    for name, values in sorted(crossed.items())}
        if is_row:
            results = {name: values[0] for name, values in results.items()}
        return results if self.output_mode == "dict" else self._joined(results)

    def _joined(self, results: dict[str, np.ndarray]) -> np.ndarray:
        layers = self.preprocessors | self.crossers
        for name, values in results.items():
            check_is_part_of_vector(name, layers[name], values)
        return np.concatenate(list(results.values()), axis=-1, dtype=np.float32)

    # --- plain data --------------------------------------------------------------------------------------------------

    def get_config(self) -> Config:
        return {"features": {column: feature.get_config() for column, feature in self.features.items()},
                "output_mode": self.output_mode, "crosses": [cross.get_config() for cross in self.crosses],
                "crossing_dim": self.crossing_dim, "hashing_dim": self.hashing_dim,
                "num_discretization_bins": self.num_discretization_bins, "name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the layer of a configuration that `get_config` returned."""
        features = {column: Feature.from_config(feature) for column, feature in config["features"].items()}
        return cls(**{**config, "features": features, "crosses": [Cross(**cross) for cross in config["crosses"]]})

    def __repr__(self) -> str:
        return f"FeatureSpace({len(self.features)} features, output_mode={self.output_mode!r})"


@contextlib.contextmanager
def _naming_feature(column: str) -> Iterator[None]:
    """Names a feature in the errors of its layer."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"Feature {column!r}: {error}") from error


def _name(name: str | None, kind: str) -> str:
    return f"{name or kind}_preprocessor"


def _is_table(data: object) -> bool:
    return isinstance(data, Mapping) or (hasattr(data, "columns") and isinstance(data.columns, Iterable))


def _names_of(table: Any) -> list[Any]:
    return list(table.keys() if hasattr(table, "keys") else table.columns)


def _with_axis(column: np.ndarray) -> np.ndarray:
    """Returns a column with an axis of features."""
    return column.reshape(1, 1) if column.ndim == 0 else column[:, None] if column.ndim == 1 else column


def _encoded(name: str, layer: PreprocessingLayer, output_mode: str, values: np.ndarray) -> np.ndarray:
    """Returns a feature's or a cross's values as its `output_mode` says."""
    encoder = encoder_of(name, layer, output_mode)
    return values if encoder is None else np.asarray(encoder(values))
