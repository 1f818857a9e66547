"""`trainer.load`, and `trainer.load_model`, which has the name of Keras's function."""

from __future__ import annotations

import os
from typing import TypeVar

from trainer.model.core import saved_model
from trainer.model.core.model_core import core_of
from trainer.model.model import Model
from trainer.saving.arrays.file_kinds import checked_path

M = TypeVar("M", bound=Model)


def load(filepath: str | os.PathLike[str], model: M) -> M:
    """Restores a model to the training state that `Model.save` wrote: weights, optimizer, step and seed.

    Args:
      filepath: the file or the folder. In a folder with numbered checkpoints, as `OrbaxCheckpoint` writes them, the
        checkpoint with the largest number is loaded.
      model: a model of the same module, compiled in the same way. Its strategy may differ. It may be unbuilt.

    Returns:
      `model`.

    Raises:
      FileNotFoundError: if there is no such file or folder.
      ValueError: if the content is damaged, is not a training state, or belongs to another module or optimizer; the
        message lists the arrays that differ.
      TypeError: if `filepath` is not a path, or `model` is not a model.

    Example:
      >>> model.save("digits")  # doctest: +SKIP
      >>> model = trainer.load("digits", new_model())  # doctest: +SKIP
    """
    path = checked_path("filepath", filepath)
    if not isinstance(model, Model):
        raise TypeError("`model` must be a model that is made and compiled like the one that was saved. Received: a "
                        f"value of type {type(model).__name__}.")
    saved_model.restore(path, core_of(model).state)
    return model


def load_model(filepath: str | os.PathLike[str], model: M | None = None) -> M:
    """Restores a model to the training state that `Model.save` wrote, as `load` does.

    Keras's function of this name also makes the model, from code and classes that the file names. Files of this
    trainer hold arrays and no code, so loading runs no code of the file: your code makes the model.

    Args:
      filepath: the file or the folder.
      model: a model of the same module, compiled in the same way; see `load`.

    Returns:
      `model`.

    Raises:
      TypeError: without a model, or as in `load`.
      ValueError: for a file of Keras, or as in `load`.
      FileNotFoundError: as in `load`.

    Example:
      >>> model = trainer.load_model("digits", model=new_model())  # doctest: +SKIP

    Source: `keras.saving.load_model`.
    """
    path = checked_path("filepath", filepath)
    if path.endswith((".keras", ".h5", ".hdf5")):
        raise ValueError(f"{path!r} has the name of a file of Keras, whose models hold layers of Keras. Make the model "
                         "of Flax layers; `trainer.models.load_keras_weights(model, path)` loads its weights.")
    if model is None:
        raise TypeError("`load_model` needs a model: a file holds its weights, its optimizer's state, the step and the "
                        "seed, and no code of it. Make and compile it as when it was saved: "
                        f"`trainer.load_model({path!r}, model=new_model())`.")
    return load(path, model)
