"""The data sets that scikit-learn brings along."""

from __future__ import annotations

import importlib
from typing import Any


def bundled(loader: str) -> Any:
    """Returns what a function of `sklearn.datasets` gives.

    Raises:
      ImportError: without scikit-learn; says how to install it.
    """
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ImportError("This data set comes with scikit-learn. Install it: "
                          "`pip install 'trainer-jax[sklearn]'`.") from error
    return getattr(datasets, loader)()
