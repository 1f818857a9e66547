from trainer.estimator.canned.baseline import (
    BaselineClassifier as BaselineClassifier,
    BaselineEstimator as BaselineEstimator,
    BaselineRegressor as BaselineRegressor,
)
from trainer.estimator.canned.combined import (
    DNNLinearCombinedClassifier as DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator as DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor as DNNLinearCombinedRegressor,
)
from trainer.estimator.canned.dnn import (
    DNNClassifier as DNNClassifier,
    DNNEstimator as DNNEstimator,
    DNNRegressor as DNNRegressor,
)
from trainer.estimator.canned.linear import (
    LinearClassifier as LinearClassifier,
    LinearEstimator as LinearEstimator,
    LinearRegressor as LinearRegressor,
)
