"""TensorFlow's Estimator API for Flax modules, on `trainer.Model` and every strategy."""

from trainer.core.calls.public_names import attach_stub

_MISSING = {
    "feature_column": "Feature columns are here: `trainer.estimator.numeric_column`.",
    "inputs": "An `input_fn` returns data: `lambda: trainer.data.Dataset.from_arrays((features, labels)).batch(32)`.",
}

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=_MISSING)
