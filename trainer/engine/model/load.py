"""`trainer.load_model`, and its short name `trainer.load`."""

from __future__ import annotations

import os
from typing import TypeVar

from trainer.core.calls.entry_points import explains_arguments
from trainer.engine.model.core import saved_model
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.model import Model
from trainer.engine.saving.arrays.file_kinds import checked_path

M = TypeVar("M", bound=Model)


@explains_arguments
def load_model(filepath: str | os.PathLike[str], model: M | None = None) -> M:
    """Restores a model to the training state that `Model.save` wrote: weights, optimizer, step and seed.

    Keras's function of this name makes the model too, by code and classes that a file names. Files of this trainer hold
    arrays and no code, so loading one runs nothing: your code makes the model.

    Args:
      filepath: the file or the folder. In a folder with numbered checkpoints, as `OrbaxCheckpoint` writes them, the
        checkpoint with the largest number is loaded.
      model: a model of the same module, compiled in the same way. Its strategy may differ. It may be unbuilt.

    Returns:
      `model`.

    Raises:
      FileNotFoundError: if there is no such file or folder.
      ValueError: if the content is damaged, is not a training state, or belongs to another module or optimizer; the
        message lists the arrays that differ. Also for a file of Keras, without a model.
      TypeError: if `filepath` is not a path, or `model` not a model.

    Example:
      >>> model.save("digits")  # doctest: +SKIP
      >>> model = trainer.load_model("digits", model=new_model())  # doctest: +SKIP

    Source: `keras.saving.load_model`.
    """
    path = checked_path("filepath", filepath)
    if model is None and path.endswith((".keras", ".h5", ".hdf5")):
        raise ValueError(f"{path!r} has the name of a file of Keras, whose models hold layers of Keras. Make the model "
                         "of Flax layers; `trainer.models.load_keras_weights(model, path)` loads its weights.")
    if model is None:
        raise TypeError("`load_model` needs a model: a file holds its weights, its optimizer's state, the step and the "
                        "seed, and no code of it. Make and compile it as when it was saved: "
                        f"`trainer.load_model({path!r}, model=new_model())`.")
    if not isinstance(model, Model):
        raise TypeError("`model` must be a model that is made and compiled like the one that was saved. Received: a "
                        f"value of type {type(model).__name__}.")
    saved_model.restore(path, core_of(model).state)
    return model


load = load_model
