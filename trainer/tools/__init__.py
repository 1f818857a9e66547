"""Tools around a training: before, after and alongside it. They use a model as its users do."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.tools.finders import BatchSizeSearch, LearningRateSearch, find_batch_size, find_learning_rate

__all__ = ["BatchSizeSearch", "LearningRateSearch", "find_batch_size", "find_learning_rate"]

# Imported on first use: the command line, which is also in this package, must start without JAX.
_HOMES = dict.fromkeys(__all__, "finders")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trainer.tools.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
