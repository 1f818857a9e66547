"""Flax modules to train: published architectures, named as in `keras.applications`.

The modules are plain Linen modules. They do not depend on the trainer and work with any Flax training loop.
"""

from typing import Any

from trainer.core.public_names import attach_stub

_load, __dir__, __all__ = attach_stub(__name__)


def __getattr__(name: str) -> Any:
    if name == "load_model":
        raise AttributeError("Models are loaded by `trainer.load_model(path, model=...)`.")
    return _load(name)
