"""Names that models of earlier Keras and of PyTorch have, for the errors of a model that lacks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_MODE = "`fit` trains, `evaluate` and `predict` do not: they pass the module its flag"
_PLACE = "a strategy places a model: make it in `with trainer.distribute.OneDeviceStrategy(\"gpu:0\").scope():`"
_INSTEAD = {
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


class ForeignNames:
    """Base of classes whose errors for other libraries' attributes name the replacement."""

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __getattr__(self, name: str) -> Any:
            if name in _INSTEAD and not hasattr(type(self), name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. Instead: "
                                     f"{_INSTEAD[name]}.", name=name, obj=self)
            return object.__getattribute__(self, name)  # raises the error again, perhaps from within a property
