"""Feature columns with TensorFlow's names and numbers: from named features to the input of a model.

Owns both halves: `HostTransform`, which converts features to numbers on the host, and the Flax modules that compute the
input of a model from these numbers on the device. Does not depend on models, losses or input pipelines.
"""

from trainer.estimator.feature_columns.base import CategoricalColumn, DenseColumn, FeatureColumn
from trainer.estimator.feature_columns.crossed import crossed_column
from trainer.estimator.feature_columns.embedding import embedding_column, shared_embeddings
from trainer.estimator.feature_columns.hashed import categorical_column_with_hash_bucket
from trainer.estimator.feature_columns.host_transform import HostTransform
from trainer.estimator.feature_columns.identity import categorical_column_with_identity
from trainer.estimator.feature_columns.indicator import indicator_column
from trainer.estimator.feature_columns.input_layers import DenseFeatures, SequenceFeatures
from trainer.estimator.feature_columns.linear_features import LinearFeatures
from trainer.estimator.feature_columns.numeric import bucketized_column, numeric_column
from trainer.estimator.feature_columns.sequence import (
    sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list,
    sequence_numeric_column,
)
from trainer.estimator.feature_columns.vocabulary import (
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)
from trainer.estimator.feature_columns.weighted import weighted_categorical_column

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "DenseFeatures",
    "FeatureColumn",
    "HostTransform",
    "LinearFeatures",
    "SequenceFeatures",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "numeric_column",
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
    "shared_embeddings",
    "weighted_categorical_column",
]
