from trainer.losses.base import Loss as Loss
from trainer.losses.focal import (
    BinaryFocalCrossentropy as BinaryFocalCrossentropy,
    CategoricalFocalCrossentropy as CategoricalFocalCrossentropy,
    CategoricalGeneralizedCrossEntropy as CategoricalGeneralizedCrossEntropy,
    binary_focal_crossentropy as binary_focal_crossentropy,
    categorical_focal_crossentropy as categorical_focal_crossentropy,
    categorical_generalized_cross_entropy as categorical_generalized_cross_entropy,
)
from trainer.losses.hinges import (
    CategoricalHinge as CategoricalHinge,
    Hinge as Hinge,
    SquaredHinge as SquaredHinge,
    categorical_hinge as categorical_hinge,
    hinge as hinge,
    squared_hinge as squared_hinge,
)
from trainer.losses.linear_logits import LinearLogits as LinearLogits
from trainer.losses.probabilistic import (
    BinaryCrossentropy as BinaryCrossentropy,
    CategoricalCrossentropy as CategoricalCrossentropy,
    KLDivergence as KLDivergence,
    Poisson as Poisson,
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
    binary_crossentropy as binary_crossentropy,
    categorical_crossentropy as categorical_crossentropy,
    kl_divergence as kl_divergence,
    poisson as poisson,
    sparse_categorical_crossentropy as sparse_categorical_crossentropy,
)
from trainer.losses.registry import as_loss as as_loss, deserialize as deserialize, get as get, serialize as serialize
from trainer.losses.regression import (
    CosineSimilarity as CosineSimilarity,
    Huber as Huber,
    LogCosh as LogCosh,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanAbsolutePercentageError as MeanAbsolutePercentageError,
    MeanSquaredError as MeanSquaredError,
    MeanSquaredLogarithmicError as MeanSquaredLogarithmicError,
    cosine_similarity as cosine_similarity,
    huber as huber,
    log_cosh as log_cosh,
    mean_absolute_error as mean_absolute_error,
    mean_absolute_percentage_error as mean_absolute_percentage_error,
    mean_squared_error as mean_squared_error,
    mean_squared_logarithmic_error as mean_squared_logarithmic_error,
)
from trainer.losses.sequence import CTC as CTC, ctc as ctc
from trainer.losses.whole_batch import (
    Circle as Circle,
    Dice as Dice,
    Tversky as Tversky,
    circle as circle,
    dice as dice,
    tversky as tversky,
)
