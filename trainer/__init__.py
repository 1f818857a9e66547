"""A Keras-style trainer for Flax modules: the same numbers on any number of devices."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from trainer import callbacks, data, distribute, estimator, losses, metrics, models, optimizers, testing, utils
    from trainer.compile.persistent_cache import enable_compilation_cache
    from trainer.core.train_state import TrainState
    from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
    from trainer.losses import regularizers
    from trainer.model.load import load
    from trainer.model.model import Model, Sequential
    from trainer.model.sidecar_evaluator import SidecarEvaluator
    from trainer.saving.export import load_exported
    from trainer.tools.report import report

    __version__: str

__all__ = [
    "Model",
    "Sequential",
    "SidecarEvaluator",
    "TrainState",
    "callbacks",
    "data",
    "distribute",
    "enable_compilation_cache",
    "estimator",
    "load",
    "load_exported",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "pack_x_y_sample_weight",
    "regularizers",
    "report",
    "testing",
    "unpack_x_y_sample_weight",
    "utils",
]

# Imported when they are first used: the launcher, which lives in this package too, must start at once and without JAX.
_HOMES = {
    "Model": "model",
    "Sequential": "model",
    "SidecarEvaluator": "model.sidecar_evaluator",
    "TrainState": "core.train_state",
    "enable_compilation_cache": "compile.persistent_cache",
    "load": "model.load",
    "load_exported": "saving.export",
    "pack_x_y_sample_weight": "data",
    "regularizers": "losses",
    "report": "tools.report",
    "unpack_x_y_sample_weight": "data",
}


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
