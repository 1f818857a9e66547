"""scikit-learn's estimators over Flax modules: `TrainerClassifier` and `TrainerRegressor`.

Owns the translation between the two: labels to class indices, outputs to labels, parameters to `compile` and `fit`, and
the state of an estimator for Python's copy protocol, which holds NumPy arrays in place of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from trainer import models
from trainer.core import tree_paths
from trainer.core.errors import wrong_type
from trainer.core.modules.calling.nnx_types import is_nnx_module
from trainer.core.types import ArrayLike
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.model import Model
from trainer.losses import SparseCategoricalCrossentropy

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as missing:
    raise ImportError("`TrainerClassifier` and `TrainerRegressor` are estimators of scikit-learn, of version 1.6 or "
                      f"later, which is not installed: pip install 'trainer-jax[sklearn]'. {missing}") from missing

_DEFAULT_HIDDEN = (100,)  # as in scikit-learn's own perceptrons
_MODEL, _ARRAYS, _INPUTS = "model_", "_model_arrays", "_model_inputs"


class _TrainerEstimator(BaseEstimator):
    """The common base of both estimators; see `TrainerClassifier`."""

    model_: Model

    def __init__(
        self, module: Any = None, *, module_kwargs: Mapping[str, Any] | None = None, optimizer: Any = "adam",
        loss: Any = None, metrics: Any = None, epochs: int = 20, batch_size: int | None = 32, callbacks: Any = None,
        validation_split: float = 0.0, compile_kwargs: Mapping[str, Any] | None = None,
        fit_kwargs: Mapping[str, Any] | None = None, warm_start: bool = False, random_state: Any = 0, verbose: Any = 0,
    ):
        self.module = module
        self.module_kwargs = module_kwargs
        self.optimizer = optimizer
        self.loss = loss
        self.metrics = metrics
        self.epochs = epochs
        self.batch_size = batch_size
        self.callbacks = callbacks
        self.validation_split = validation_split
        self.compile_kwargs = compile_kwargs
        self.fit_kwargs = fit_kwargs
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    # --- hooks of subclasses -------------------------------------------------------------------------------------

    def _default_loss(self) -> Any:
        raise NotImplementedError

    def _targets(self, y: np.ndarray) -> np.ndarray:
        """Returns the training targets of the model, and records their meaning."""
        raise NotImplementedError

    def _outputs(self) -> int:
        """Returns the number of outputs per row."""
        raise NotImplementedError

    # --- scikit-learn's methods ----------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Trains a new model, or with `warm_start` the existing model; returns this estimator.

        Args:
          X: the inputs, shape `(rows, ...)`.
          y: the targets.
          sample_weight: weights of rows, shape `(rows,)`.

        Raises:
          ValueError: for invalid data, or a module whose number of outputs does not suit `y`.
        """
        goes_on = bool(self.warm_start) and hasattr(self, _MODEL)
        X, y = validate_data(self, X, y, reset=not goes_on, **self._validation())
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float32)
        targets = self._targets(y)
        model = self.model_ if goes_on else self._new_model(X, targets)
        if not goes_on:
            model.build(X[:1])
        self._check_outputs(jax.eval_shape(lambda state: model.apply(state.params, state, X[:1])[0], model.state))
        arguments = {"batch_size": self.batch_size, "epochs": self.epochs, "callbacks": self.callbacks,
                     "verbose": self.verbose, "validation_split": self.validation_split, **(self.fit_kwargs or {})}
        history = model.fit(X, targets, sample_weight=sample_weight, **arguments)
        self.history_ = history.history
        self.n_iter_ = len(history.epoch)
        self.model_ = model
        return self

    def _predicted(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self, _MODEL)
        X = validate_data(self, X, reset=False, **self._input_validation())
        return np.asarray(self.model_.predict(X, batch_size=self.batch_size, verbose=0))

    # --- the model -----------------------------------------------------------------------------------------------

    def _new_model(self, X: np.ndarray, targets: np.ndarray) -> Model:
        # A copy of the module: NNX objects receive the trained weights, and an estimator must not change its
        # parameters.
        model = Model(self._new_module(X, targets), seed=self._seed())
        model.compile(**{"optimizer": copy.deepcopy(self.optimizer), "metrics": copy.deepcopy(self.metrics),
                         "loss": self._default_loss() if self.loss is None else self.loss,
                         **(self.compile_kwargs or {})})
        return model

    def _new_module(self, X: np.ndarray, targets: np.ndarray) -> Any:
        kwargs = dict(self.module_kwargs or {})
        if self.module is None:
            return models.MLP(**{"num_classes": self._outputs(), "hidden": _DEFAULT_HIDDEN,
                                 "classifier_activation": None, **kwargs})
        if isinstance(self.module, type) or _is_factory(self.module):
            return self.module(**kwargs) if isinstance(self.module, type) else self.module(X, targets, **kwargs)
        if kwargs:
            raise ValueError("`module_kwargs` are given to a class of modules or a function that makes one. Received a "
                             f"module that is made already, of type {type(self.module).__name__}.")
        return copy.deepcopy(self.module)

    def _seed(self) -> int:
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state) % 2**32
        return int(check_random_state(self.random_state).randint(2**31))

    def _check_outputs(self, outputs: Any) -> None:
        expected = self._outputs()
        shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
        if shapes != [(1, expected)]:
            raise ValueError(f"The module must return outputs of shape (rows, {expected}) for these targets. Received: "
                             f"{' and '.join(str(('rows', *shape[1:])) for shape in shapes)}. Give a function "
                             "`module(X, y)` that makes a module for the data.")

    def _validation(self) -> dict[str, Any]:
        return self._input_validation()

    @staticmethod
    def _input_validation() -> dict[str, Any]:
        return {"allow_nd": True}

    # --- copies --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes, with the model's arrays as NumPy arrays by name in place of the model."""
        state = dict(super().__getstate__())
        model = state.pop(_MODEL, None)
        if model is not None:
            state[_ARRAYS] = {name: np.asarray(leaf) for name, leaf in tree_paths.named_leaves(model.state).items()}
            specs = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), core_of(model).state.inputs)
            state[_INPUTS] = specs
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreates the model from its arrays."""
        state = dict(state)
        arrays, inputs = state.pop(_ARRAYS, None), state.pop(_INPUTS, None)
        super().__setstate__(state)
        if arrays is not None:
            model = self._new_model(inputs, self._example_targets())
            model.build(inputs)
            model.state = tree_paths.with_leaves(model.state, arrays)
            self.model_ = model

    def _example_targets(self) -> np.ndarray:
        """Returns minimal targets with the right number of outputs, for a function that makes a module."""
        raise NotImplementedError


class TrainerClassifier(ClassifierMixin, _TrainerEstimator):
    """A classifier of scikit-learn that trains a Flax module with `trainer.Model`, on the strategy in scope.

    `GridSearchCV`, `Pipeline`, `clone` and so on accept it. A copy and a pickle hold the arrays of the training state
    as NumPy arrays, so that `predict` and, with `warm_start`, `fit` continue as with the original.

    Args:
      module: a Flax module or a list of layers, with outputs of shape `(rows, classes)`; a class of modules; or a
        function `(X, y, **module_kwargs)` that makes a module, where `y` are class indices from 0. None is
        `trainer.models.MLP` with a hidden layer of 100.
      module_kwargs: arguments for a class or a function.
      optimizer, loss, metrics: as in `compile`. The default loss is the cross-entropy of logits, or of probabilities if
        `from_logits` is False. The targets of the loss are class indices.
      epochs, batch_size, callbacks, validation_split: as in `fit`.
      compile_kwargs, fit_kwargs: further arguments of `compile` and `fit`.
      warm_start: whether `fit` continues from the previous `fit`, if any, rather than from new weights.
      random_state: the model's seed; a `RandomState` or None draws it.
      verbose: as in `fit`.
      from_logits: whether the module returns logits rather than probabilities.

    Attributes:
      model_: the `trainer.Model`.
      classes_: the labels, sorted.
      history_: the logs of the last `fit`, as `History.history`.
      n_iter_: number of epochs of the last `fit`.
      n_features_in_: the size of the second dimension of `X`.

    Raises:
      ImportError: if scikit-learn is not installed.

    Example:
      >>> from sklearn.datasets import load_iris
      >>> X, y = load_iris(return_X_y=True)
      >>> TrainerClassifier(epochs=30).fit(X, y).score(X, y) > 0.9
      True

    Source: `keras.wrappers.SKLearnClassifier`.
    """

    classes_: np.ndarray

    def __init__(
        self, module: Any = None, *, module_kwargs: Mapping[str, Any] | None = None, optimizer: Any = "adam",
        loss: Any = None, metrics: Any = None, epochs: int = 20, batch_size: int | None = 32, callbacks: Any = None,
        validation_split: float = 0.0, compile_kwargs: Mapping[str, Any] | None = None,
        fit_kwargs: Mapping[str, Any] | None = None, warm_start: bool = False, random_state: Any = 0, verbose: Any = 0,
        from_logits: bool = True,
    ):
        super().__init__(
            module, module_kwargs=module_kwargs, optimizer=optimizer, loss=loss, metrics=metrics, epochs=epochs,
            batch_size=batch_size, callbacks=callbacks, validation_split=validation_split,
            compile_kwargs=compile_kwargs, fit_kwargs=fit_kwargs, warm_start=warm_start, random_state=random_state,
            verbose=verbose)
        self.from_logits = from_logits

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the label of each row, by its largest output."""
        outputs = self._predicted(X)
        return self.classes_[outputs.argmax(1)]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Returns the probability of each class, shape `(rows, classes)`, in the order of `classes_`."""
        outputs = self._predicted(X)
        if not self.from_logits:
            return outputs
        return np.asarray(jax.nn.softmax(outputs.astype(np.float32), axis=1))

    def _default_loss(self) -> Any:
        return SparseCategoricalCrossentropy(from_logits=self.from_logits)

    def _targets(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        if self.warm_start and hasattr(self, _MODEL):
            unknown = np.setdiff1d(y, self.classes_)
            if len(unknown):
                raise ValueError(f"With `warm_start`, `y` must have labels of the first `fit`, which had "
                                 f"{len(self.classes_)} classes. Received {len(unknown)} others.")
            return np.searchsorted(self.classes_, y).astype(np.int32)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        return numbers.astype(np.int32)

    def _outputs(self) -> int:
        return len(self.classes_)

    def _example_targets(self) -> np.ndarray:
        return np.arange(len(self.classes_), dtype=np.int32)


class TrainerRegressor(RegressorMixin, _TrainerEstimator):
    """A regressor of scikit-learn that trains a Flax module with `trainer.Model`, on the strategy in scope.

    Targets of shape `(rows,)` or `(rows, outputs)` are converted to float32 of shape `(rows, outputs)` for training,
    and predictions have the shape of the targets.

    Args:
      module: as in `TrainerClassifier`, with outputs of shape `(rows, outputs)`.
      loss: as in `compile`; by default the mean squared error.
      module_kwargs, optimizer, metrics, epochs, batch_size, callbacks, validation_split, compile_kwargs, fit_kwargs,
        warm_start, random_state, verbose: as in `TrainerClassifier`.

    Attributes:
      model_, history_, n_iter_, n_features_in_: as in `TrainerClassifier`.

    Example:
      >>> from sklearn.datasets import make_regression
      >>> from trainer.optimizers import Adam
      >>> X, y = make_regression(200, 5, random_state=0)
      >>> TrainerRegressor(epochs=50, optimizer=Adam(0.05)).fit(X, y / 100).score(X, y / 100) > 0.9
      True

    Source: `keras.wrappers.SKLearnRegressor`.
    """

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the outputs for each row, in the shape of the targets and the dtype that the model computes in."""
        outputs = self._predicted(X)
        return outputs[:, 0] if self._is_flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _validation(self) -> dict[str, Any]:
        return {**self._input_validation(), "multi_output": True, "y_numeric": True}

    def _default_loss(self) -> Any:
        return "mse"

    def _targets(self, y: np.ndarray) -> np.ndarray:
        if y.ndim > 2:
            raise ValueError("`y` must have shape (rows,) or (rows, outputs). Received: an array of shape "
                             f"{y.shape}.")
        self._is_flat = y.ndim == 1
        targets = np.reshape(y, (len(y), -1)).astype(np.float32)
        self._num_outputs = targets.shape[1]
        return targets

    def _outputs(self) -> int:
        return self._num_outputs

    def _example_targets(self) -> np.ndarray:
        return np.zeros((1, self._num_outputs), np.float32)


def _is_factory(module: object) -> bool:
    """Returns whether a value is a function that makes modules, rather than a module."""
    if isinstance(module, (nn.Module, list, tuple, dict)) or is_nnx_module(module):
        return False
    if isinstance(module, Model):
        raise TypeError(f"`module` must be a Flax module, or make one. Received: a {type(module).__name__} of the "
                        "trainer. Give `module=model.module`, and `optimizer`, `loss` and `metrics` beside it.")
    if not callable(module):
        raise wrong_type("module", module, "a Flax module, a list of layers, a class of modules, or a function "
                                           "`(X, y)` that makes one")
    return True
