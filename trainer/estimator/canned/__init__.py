"""Canned estimators, which need no `model_fn`: linear, deep, combined, and baselines."""

from trainer.estimator.canned.baseline import BaselineClassifier, BaselineEstimator, BaselineRegressor
from trainer.estimator.canned.combined import (
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
)
from trainer.estimator.canned.dnn import DNNClassifier, DNNEstimator, DNNRegressor
from trainer.estimator.canned.linear import LinearClassifier, LinearEstimator, LinearRegressor

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
]
