"""A Keras-style trainer for Flax modules: the same numbers on any number of devices."""

import importlib as _importlib
import typing as _typing
from importlib.metadata import version as _version

from trainer import callbacks, data, distribute, losses, metrics, models, optimizers
from trainer.compilation_cache import enable_compilation_cache
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.export import load_exported
from trainer.model import Model, Sequential
from trainer.saved_model import load
from trainer.sidecar_evaluator import SidecarEvaluator as _SidecarEvaluator
from trainer.state import TrainState

if _typing.TYPE_CHECKING:
    from trainer import testing

__version__ = _version("trainer-jax")

# Its public name is there, but it is built on `Model`, which is built on `distribute`.
distribute.SidecarEvaluator = _SidecarEvaluator  # type: ignore[misc]

__all__ = [
    "Model",
    "Sequential",
    "TrainState",
    "callbacks",
    "data",
    "distribute",
    "enable_compilation_cache",
    "load",
    "load_exported",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "pack_x_y_sample_weight",
    "testing",
    "unpack_x_y_sample_weight",
]


def __getattr__(name: str) -> _typing.Any:
    # Only tests need it, and it brings what starts and ends processes.
    if name == "testing":
        return _importlib.import_module("trainer.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
