from trainer.estimator.canned import (
    BaselineClassifier as BaselineClassifier,
    BaselineEstimator as BaselineEstimator,
    BaselineRegressor as BaselineRegressor,
    DNNClassifier as DNNClassifier,
    DNNEstimator as DNNEstimator,
    DNNLinearCombinedClassifier as DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator as DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor as DNNLinearCombinedRegressor,
    DNNRegressor as DNNRegressor,
    LinearClassifier as LinearClassifier,
    LinearEstimator as LinearEstimator,
    LinearRegressor as LinearRegressor,
)
from trainer.estimator.feature_columns import (
    CategoricalColumn as CategoricalColumn,
    DenseColumn as DenseColumn,
    DenseFeatures as DenseFeatures,
    FeatureColumn as FeatureColumn,
    HostTransform as HostTransform,
    LinearFeatures as LinearFeatures,
    SequenceFeatures as SequenceFeatures,
    bucketized_column as bucketized_column,
    categorical_column_with_hash_bucket as categorical_column_with_hash_bucket,
    categorical_column_with_identity as categorical_column_with_identity,
    categorical_column_with_vocabulary_file as categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list as categorical_column_with_vocabulary_list,
    crossed_column as crossed_column,
    embedding_column as embedding_column,
    indicator_column as indicator_column,
    numeric_column as numeric_column,
    sequence_categorical_column_with_hash_bucket as sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity as sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file as sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list as sequence_categorical_column_with_vocabulary_list,
    sequence_numeric_column as sequence_numeric_column,
    shared_embeddings as shared_embeddings,
    weighted_categorical_column as weighted_categorical_column,
)
from trainer.estimator.from_model import model_to_estimator as model_to_estimator
from trainer.estimator.heads import (
    BinaryClassHead as BinaryClassHead,
    Head as Head,
    MultiClassHead as MultiClassHead,
    MultiHead as MultiHead,
    MultiLabelHead as MultiLabelHead,
    RegressionHead as RegressionHead,
)
from trainer.estimator.training.estimator import Estimator as Estimator
from trainer.estimator.training.exporters import (
    BestExporter as BestExporter,
    Exporter as Exporter,
    FinalExporter as FinalExporter,
    LatestExporter as LatestExporter,
)
from trainer.estimator.training.hooks import (
    CheckpointSaverListener as CheckpointSaverListener,
    SessionRunContext as SessionRunContext,
    SessionRunHook as SessionRunHook,
    SessionRunValues as SessionRunValues,
    StopAtStepHook as StopAtStepHook,
)
from trainer.estimator.training.run_config import RunConfig as RunConfig
from trainer.estimator.training.spec import EstimatorSpec as EstimatorSpec, ModeKeys as ModeKeys
from trainer.estimator.training.train_and_evaluate import train_and_evaluate as train_and_evaluate
from trainer.estimator.training.train_spec import EvalSpec as EvalSpec, TrainSpec as TrainSpec
from trainer.estimator.training.warm_start import WarmStartSettings as WarmStartSettings
