"""`trainer.load`."""

from __future__ import annotations

import os
from typing import TypeVar

from trainer.model import saved_model
from trainer.model.model import Model
from trainer.saving.arrays.file_kinds import checked_path

M = TypeVar("M", bound=Model)


def load(filepath: str | os.PathLike[str], model: M) -> M:
    """Brings a model to the training state that `Model.save` wrote: weights, optimizer, step and seed.

    Args:
      filepath: the file or the folder.
      model: a model of the same module, compiled in the same way. Its strategy may be another one. It need not be
        built.

    Returns:
      `model`.

    Raises:
      FileNotFoundError: if there is no such file or folder.
      ValueError: if it holds something else or is damaged, or is of another module or optimizer; the arrays that differ
        are listed.
      TypeError: if `filepath` is not a path, or `model` not a model.

    Example:
      >>> model.save("digits")  # doctest: +SKIP
      >>> model = trainer.load("digits", new_model())  # doctest: +SKIP
    """
    path = checked_path("filepath", filepath)
    if not isinstance(model, Model):
        raise TypeError("`model` must be a model that is made and compiled like the one that was saved. Received: a "
                        f"value of type {type(model).__name__}.")
    saved_model.restore(path, model._state_holder)
    return model
