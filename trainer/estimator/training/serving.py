"""Exports: folders named by time, each with a program that computes predictions."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

from trainer.estimator.training.estimator_model import EstimatorModel

FILE_NAME = "model.export"


def export(model: EstimatorModel, output_names: Sequence[str] | None, base: str) -> str:
    """Exports a model's predictions atomically to a new folder; returns the path of the folder."""
    folder = _new_folder(base)
    temporary = os.path.join(base, f"temp-{os.path.basename(folder)}")
    os.makedirs(temporary)
    model.output_names = output_names
    try:
        model.export(os.path.join(temporary, FILE_NAME))
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        model.output_names = None
    return folder


def exports_in(base: str) -> list[str]:
    """Returns the paths of the exports in a folder, oldest first."""
    if not os.path.isdir(base):
        return []
    return [os.path.join(base, name) for name in sorted((name for name in os.listdir(base) if name.isdigit()), key=int)]


def _new_folder(base: str) -> str:
    """Returns the path of a new folder, named by the seconds since 1970 and later than all other exports."""
    newest = [int(os.path.basename(path)) for path in exports_in(base)[-1:]]
    return os.path.join(base, str(max([int(time.time()), *(number + 1 for number in newest)])))
