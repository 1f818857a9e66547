from trainer.losses import (
    binary_crossentropy as binary_crossentropy,
    binary_focal_crossentropy as binary_focal_crossentropy,
    categorical_crossentropy as categorical_crossentropy,
    categorical_focal_crossentropy as categorical_focal_crossentropy,
    categorical_hinge as categorical_hinge,
    hinge as hinge,
    huber as huber,
    kl_divergence as kl_divergence,
    log_cosh as log_cosh,
    mean_absolute_error as mean_absolute_error,
    mean_absolute_percentage_error as mean_absolute_percentage_error,
    mean_squared_error as mean_squared_error,
    mean_squared_logarithmic_error as mean_squared_logarithmic_error,
    poisson as poisson,
    sparse_categorical_crossentropy as sparse_categorical_crossentropy,
    squared_hinge as squared_hinge,
)
from trainer.metrics.accuracies import (
    Accuracy as Accuracy,
    BinaryAccuracy as BinaryAccuracy,
    CategoricalAccuracy as CategoricalAccuracy,
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy as TopKCategoricalAccuracy,
    accuracy as accuracy,
    binary_accuracy as binary_accuracy,
    categorical_accuracy as categorical_accuracy,
    sparse_categorical_accuracy as sparse_categorical_accuracy,
    sparse_top_k_categorical_accuracy as sparse_top_k_categorical_accuracy,
    top_k_categorical_accuracy as top_k_categorical_accuracy,
)
from trainer.metrics.auc import AUC as AUC, AUCCurve as AUCCurve, AUCSummationMethod as AUCSummationMethod
from trainer.metrics.base import Metric as Metric
from trainer.metrics.calibration import ExpectedCalibrationError as ExpectedCalibrationError
from trainer.metrics.classification import (
    BinaryCrossentropy as BinaryCrossentropy,
    CategoricalCrossentropy as CategoricalCrossentropy,
    CategoricalHinge as CategoricalHinge,
    Hinge as Hinge,
    KLDivergence as KLDivergence,
    Poisson as Poisson,
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
    SquaredHinge as SquaredHinge,
)
from trainer.metrics.confusion import (
    FalseNegatives as FalseNegatives,
    FalsePositives as FalsePositives,
    Precision as Precision,
    Recall as Recall,
    TrueNegatives as TrueNegatives,
    TruePositives as TruePositives,
)
from trainer.metrics.correlation import (
    ConcordanceCorrelation as ConcordanceCorrelation,
    PearsonCorrelation as PearsonCorrelation,
    concordance_correlation as concordance_correlation,
    pearson_correlation as pearson_correlation,
)
from trainer.metrics.f_score import F1Score as F1Score, FBetaScore as FBetaScore
from trainer.metrics.iou import (
    BinaryIoU as BinaryIoU,
    IoU as IoU,
    MeanIoU as MeanIoU,
    OneHotIoU as OneHotIoU,
    OneHotMeanIoU as OneHotMeanIoU,
)
from trainer.metrics.operating_point import (
    PrecisionAtRecall as PrecisionAtRecall,
    RecallAtPrecision as RecallAtPrecision,
    SensitivityAtSpecificity as SensitivityAtSpecificity,
    SpecificityAtSensitivity as SpecificityAtSensitivity,
)
from trainer.metrics.r2 import R2Score as R2Score
from trainer.metrics.reduction import (
    LossMetric as LossMetric,
    Mean as Mean,
    MeanMetricWrapper as MeanMetricWrapper,
    Sum as Sum,
)
from trainer.metrics.registry import deserialize as deserialize, get as get, resolve as resolve, serialize as serialize
from trainer.metrics.regression import (
    CosineSimilarity as CosineSimilarity,
    LogCoshError as LogCoshError,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanAbsolutePercentageError as MeanAbsolutePercentageError,
    MeanSquaredError as MeanSquaredError,
    MeanSquaredLogarithmicError as MeanSquaredLogarithmicError,
    RootMeanSquaredError as RootMeanSquaredError,
)
from trainer.metrics.variable import Variable as Variable
