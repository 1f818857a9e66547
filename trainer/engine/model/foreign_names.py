"""Names that models of Keras, PyTorch and Lightning have, for the errors and warnings of a model that lacks them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

_MODE = "`fit` trains, `evaluate` and `predict` do not: they pass the module its flag"
_PLACE = "a strategy places a model: make it in `with trainer.distribute.OneDeviceStrategy(\"gpu:0\").scope():`"
_INSTEAD = {
    "params": "`state.params`; `set_weights(weights)` sets them",
    "fit_generator": "`fit` takes generators",
    "evaluate_generator": "`evaluate` takes generators",
    "predict_generator": "`predict` takes generators",
    "predict_classes": "`predict(x).argmax(axis=-1)`",
    "predict_proba": "`predict(x)`",
    "train": _MODE, "eval": _MODE,
    "to": _PLACE, "cuda": _PLACE, "cpu": _PLACE,
    "parameters": "`trainable_weights`, or `state.params` for the tree",
    "state_dict": "`save_weights(path)`, or `get_weights()`",
    "load_state_dict": "`load_weights(path)`, or `set_weights(weights)`",
}
# Methods that a subclass defines for other libraries to call.
_UNCALLED = {
    "call": "the `__call__` of the Flax module computes the outputs",
    "forward": "the `__call__` of the Flax module computes the outputs",
    "training_step": "override `train_step(self, state, batch)`",
    "validation_step": "override `test_step(self, state, batch)`",
    "configure_optimizers": "give the optimizer to `compile`",
}


class ForeignNames:
    """Base of classes whose errors for other libraries' attributes name the replacement.

    A subclass that defines a method of theirs, which nothing calls, gets a warning.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in _UNCALLED.keys() & vars(cls).keys():
            warnings.warn(f"`fit` does not call `{cls.__name__}.{name}`. Instead: {_UNCALLED[name]}.", stacklevel=2)

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __getattr__(self, name: str) -> Any:
            if name == "_core":
                raise AttributeError(f"`{type(self).__name__}.__init__` has not called `super().__init__(module)`, "
                                     "with the Flax module that has the layers. Call it first.", name=name, obj=self)
            if name in _INSTEAD and not hasattr(type(self), name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. Instead: "
                                     f"{_INSTEAD[name]}.", name=name, obj=self)
            return object.__getattribute__(self, name)  # raises the error again, perhaps from within a property
