"""Exports: folders named by time, each with a program that computes predictions."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

from trainer.estimator.training.estimator_model import EstimatorModel

FILE_NAME = "model.export"
_TEMPORARY = "temp-"


def export(model: EstimatorModel, output_names: Sequence[str] | None, base: str) -> str:
    """Exports a model's predictions atomically to a new folder; returns the path of the folder."""
    folder = _new_folder(base)
    temporary = os.path.join(base, f"{_TEMPORARY}{os.path.basename(folder)}")
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


def exports_in(base: str, after: int = -1) -> list[str]:
    """Returns the paths of the exports in a folder with a number above `after`, oldest first."""
    if not os.path.isdir(base):
        return []
    numbers = sorted((name for name in os.listdir(base) if name.isdigit() and int(name) > after), key=int)
    return [os.path.join(base, name) for name in numbers]


def newest_number(base: str) -> int:
    """Returns the number of the newest export in a folder; -1 without an export."""
    return max((int(os.path.basename(path)) for path in exports_in(base)), default=-1)


def remove_unfinished(base: str, after: int) -> None:
    """Removes the temporary folders of killed exports with a number above `after`."""
    if os.path.isdir(base):
        for name in os.listdir(base):
            number = name.removeprefix(_TEMPORARY)
            if name.startswith(_TEMPORARY) and number.isdigit() and int(number) > after:
                shutil.rmtree(os.path.join(base, name))


def _new_folder(base: str) -> str:
    """Returns the path of a new folder, named by the seconds since 1970 and later than all other exports."""
    return os.path.join(base, str(max(int(time.time()), newest_number(base) + 1)))
