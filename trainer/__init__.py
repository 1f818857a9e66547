"""A Keras-style trainer for Flax modules: the same numbers on any number of devices."""

import importlib as _importlib
import os as _os
import typing as _typing

if _typing.TYPE_CHECKING:
    from trainer import (
        callbacks,
        data,
        datasets,
        distribute,
        estimator,
        losses,
        metrics,
        models,
        optimizers,
        regularizers,
        testing,
        tools,
        utils,
    )
    from trainer.compile.persistent_cache import enable_compilation_cache
    from trainer.core.train_state import TrainState
    from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
    from trainer.model.load import load, load_model
    from trainer.model.model import Model, Sequential
    from trainer.model.sidecar_evaluator import SidecarEvaluator
    from trainer.saving.export import load_exported
    from trainer.tools.plan import plan
    from trainer.tools.report import report
    from trainer.tools.sklearn_wrappers import TrainerClassifier as TrainerClassifier
    from trainer.tools.sklearn_wrappers import TrainerRegressor as TrainerRegressor

    __version__: str

__all__ = [
    "Model",
    "Sequential",
    "SidecarEvaluator",
    "TrainState",
    "callbacks",
    "data",
    "datasets",
    "distribute",
    "enable_compilation_cache",
    "estimator",
    "load",
    "load_exported",
    "load_model",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "pack_x_y_sample_weight",
    "plan",
    "regularizers",
    "report",
    "testing",
    "tools",
    "unpack_x_y_sample_weight",
    "utils",
]

# Imported when they are first used: the launcher, which lives in this package too, must start at once and without JAX.
_HOMES = {
    "Model": "model",
    "Sequential": "model",
    "SidecarEvaluator": "model.sidecar_evaluator",
    "TrainState": "core.train_state",
    "TrainerClassifier": "tools.sklearn_wrappers",  # not in `__all__`: `import *` must work without scikit-learn
    "TrainerRegressor": "tools.sklearn_wrappers",
    "enable_compilation_cache": "compile.persistent_cache",
    "load": "model.load",
    "load_exported": "saving.export",
    "load_model": "model.load",
    "pack_x_y_sample_weight": "data",
    "plan": "tools.plan",
    "report": "tools.report",
    "unpack_x_y_sample_weight": "data",
}


# A file of Coqui's `trainer` and `coqui-tts-trainer`, which install a package of this name.
_FOREIGN = "trainer_utils.py"
if _os.path.exists(_os.path.join(_os.path.dirname(__file__), _FOREIGN)):
    raise ImportError(
        f"Two distributions have installed a package `trainer` into {_os.path.dirname(__file__)!r}: trainer-jax and "
        "another one, such as Coqui's `trainer` or `coqui-tts-trainer`. Each has replaced files of the other. Give "
        "each an environment of its own: `pip uninstall trainer coqui-tts-trainer trainer-jax`, then install the one "
        "that is needed here. See docs/errors.md#other-distribution.")


def __getattr__(name: str) -> _typing.Any:
    if name == "__version__":
        from importlib.metadata import version

        value: _typing.Any = version("trainer-jax")
    elif name in _HOMES:
        value = getattr(_importlib.import_module(f"trainer.{_HOMES[name]}"), name)
    elif name in __all__:
        value = _importlib.import_module(f"trainer.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
