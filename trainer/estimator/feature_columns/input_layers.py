"""Input layers over feature columns: DenseFeatures, and SequenceFeatures for sequences."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.estimator.feature_columns.base import FeatureColumn, Features, read_feature
from trainer.estimator.feature_columns.parameters import as_dense_columns, check_features, tables_of


class DenseFeatures(nn.Module):
    """Flax module that concatenates dense columns, in the order of their names.

    Parameters: `<name>/embedding` of shape `(buckets, dimension)` for each embedding column, and once for shared
    embeddings. Tables that are not trained are in the collection `non_trainable`.

    Args:
      columns: numeric, bucketized, indicator and embedding columns.

    Raises:
      TypeError: if an element of `columns` is not a feature column.
      ValueError: if a column is categorical or of sequences, there are no columns, or two columns have the same name.

    Example:
      >>> from trainer.estimator.feature_columns import HostTransform, bucketized_column, numeric_column
      >>> price = numeric_column("price")
      >>> columns = [price, bucketized_column(price, [10, 20])]
      >>> features = HostTransform(columns)({"price": [5, 10]})
      >>> x, variables = DenseFeatures(columns).init_with_output(jax.random.key(0), features)
      >>> x.tolist()
      [[5.0, 1.0, 0.0, 0.0], [10.0, 0.0, 1.0, 0.0]]

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/layers/DenseFeatures, of TensorFlow 2.15.
    """

    columns: Sequence[FeatureColumn]

    def __post_init__(self) -> None:
        columns = as_dense_columns(self.columns)
        for column in columns:
            if column.lengths_key is not None:
                raise ValueError(f"Column {column.name!r} is of sequences. Use a column that is not, or "
                                 "`SequenceFeatures` in the place of `DenseFeatures`.")
        object.__setattr__(self, "columns", columns)  # a tuple, so that modules can be hashed
        super().__post_init__()

    @nn.compact
    def __call__(self, features: Features) -> jax.Array:
        """Returns float32 of shape `(rows, width)`, where `width` is the sum of the columns' widths.

        Args:
          features: arrays from `HostTransform`, by key.

        Raises:
          TypeError: if `features` is not a dict.
          ValueError: if an array is missing.
        """
        check_features(features)
        columns = as_dense_columns(self.columns)
        tables = tables_of(columns)
        return jnp.concatenate([column.dense(features, tables) for column in columns], axis=-1)


class SequenceFeatures(nn.Module):
    """Flax module that concatenates columns of sequences, in the order of their names.

    The parameters are named as in `DenseFeatures`.

    Args:
      columns: sequence-numeric columns, and indicators and embeddings of sequence-categorical columns.

    Raises:
      TypeError: if an element of `columns` is not a feature column.
      ValueError: if a column is categorical or not of sequences, there are no columns, or two columns have the same
        name.

    Example:
      >>> from trainer.estimator.feature_columns import HostTransform, sequence_numeric_column
      >>> columns = [sequence_numeric_column("temperature")]
      >>> features = HostTransform(columns)({"temperature": [[20.0, 21.0], [19.0, float("nan")]]})
      >>> (x, lengths), variables = SequenceFeatures(columns).init_with_output(jax.random.key(0), features)
      >>> x.shape, lengths.tolist()
      ((2, 2, 1), [2, 1])

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/experimental/SequenceFeatures, of TensorFlow 2.15.
    """

    columns: Sequence[FeatureColumn]

    def __post_init__(self) -> None:
        columns = as_dense_columns(self.columns)
        for column in columns:
            if column.lengths_key is None:
                raise ValueError(f"Column {column.name!r} is of no sequences. Use one of "
                                 "`sequence_categorical_column_with_*` or `sequence_numeric_column`, or "
                                 "`DenseFeatures` in the place of `SequenceFeatures`.")
        object.__setattr__(self, "columns", columns)  # a tuple, so that modules can be hashed
        super().__post_init__()

    @nn.compact
    def __call__(self, features: Features) -> tuple[jax.Array, jax.Array]:
        """Returns the sequences, float32 of shape `(rows, time, width)`, and their lengths, int32 of shape `(rows,)`.

        Args:
          features: arrays from `HostTransform`, by key.

        Raises:
          TypeError: if `features` is not a dict.
          ValueError: if an array is missing, or columns differ in the number of time steps.
        """
        check_features(features)
        columns = as_dense_columns(self.columns)
        tables = tables_of(columns)
        parts = [column.dense(features, tables) for column in columns]
        steps = {part.shape[1] for part in parts}
        if len(steps) > 1:
            received = ", ".join(f"{column.name!r} has {part.shape[1]}"
                                 for column, part in zip(columns, parts, strict=True))
            raise ValueError(f"All sequences must be padded to one number of time steps. Received: {received}.")
        return jnp.concatenate(parts, axis=-1), read_feature(features, str(columns[0].lengths_key), columns[0].name)
