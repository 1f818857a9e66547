"""Flax modules to train: published architectures, each in its own file, under the names of `keras.applications`.

They are plain Linen modules and know nothing of the trainer; any of them works with any Flax training loop.
"""

from typing import Any

from trainer.core.public_names import attach_stub

_load, __dir__, __all__ = attach_stub(__name__)


def __getattr__(name: str) -> Any:
    if name == "load_model":
        raise AttributeError("Models are loaded by `trainer.load_model(path, model=...)`.")
    return _load(name)
