from trainer.estimator.feature_columns.base import (
    CategoricalColumn as CategoricalColumn,
    DenseColumn as DenseColumn,
    FeatureColumn as FeatureColumn,
)
from trainer.estimator.feature_columns.crossed import crossed_column as crossed_column
from trainer.estimator.feature_columns.embedding import (
    embedding_column as embedding_column,
    shared_embeddings as shared_embeddings,
)
from trainer.estimator.feature_columns.hashed import (
    categorical_column_with_hash_bucket as categorical_column_with_hash_bucket,
)
from trainer.estimator.feature_columns.host_transform import HostTransform as HostTransform
from trainer.estimator.feature_columns.identity import (
    categorical_column_with_identity as categorical_column_with_identity,
)
from trainer.estimator.feature_columns.indicator import indicator_column as indicator_column
from trainer.estimator.feature_columns.input_layers import (
    DenseFeatures as DenseFeatures,
    SequenceFeatures as SequenceFeatures,
)
from trainer.estimator.feature_columns.linear_features import LinearFeatures as LinearFeatures
from trainer.estimator.feature_columns.numeric import (
    bucketized_column as bucketized_column,
    numeric_column as numeric_column,
)
from trainer.estimator.feature_columns.sequence import (
    sequence_categorical_column_with_hash_bucket as sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity as sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file as sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list as sequence_categorical_column_with_vocabulary_list,
    sequence_numeric_column as sequence_numeric_column,
)
from trainer.estimator.feature_columns.vocabulary import (
    categorical_column_with_vocabulary_file as categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list as categorical_column_with_vocabulary_list,
)
from trainer.estimator.feature_columns.weighted import weighted_categorical_column as weighted_categorical_column
