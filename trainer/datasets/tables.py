"""Tables: prices of houses, and the data sets that are part of scikit-learn."""

from __future__ import annotations

import importlib
import os
from typing import ClassVar

from trainer.core.arguments import check_word
from trainer.datasets.keras_files import Split, npz_arrays, path_of, shuffled_split


class boston_housing:
    """Prices of houses in Boston: 506 rows. A column encodes race; use the data only to discuss this."""

    @staticmethod
    def load_data(
        path: str | os.PathLike[str] = "boston_housing.npz", test_split: float = 0.2, seed: int = 113
    ) -> Split:
        """Returns 13 numbers of each place, and the median price of its houses in thousands of dollars.

        Args:
          path: name of the file in the cache folder, or the path of a copy; see `mnist.load_data`.
          test_split: fraction of the rows for testing.
          seed: seed of the order of rows.

        Source: https://keras.io/api/datasets/boston_housing/.
        """
        x, y = npz_arrays(path_of(path, "boston_housing.npz"), "x", "y")
        return shuffled_split(x, y, test_split, seed)


class california_housing:
    """Prices of houses in California: 20,640 rows."""

    @staticmethod
    def load_data(
        version: str = "large", path: str | os.PathLike[str] = "california_housing.npz", test_split: float = 0.2,
        seed: int = 113,
    ) -> Split:
        """Returns 8 numbers of each district, and the median price of its houses in dollars.

        Args:
          version: "large", or "small" for the first 600 rows.
          path: name of the file in the cache folder, or the path of a copy; see `mnist.load_data`.
          test_split: fraction of the rows for testing.
          seed: seed of the order of rows.

        Source: https://keras.io/api/datasets/california_housing/.
        """
        check_word("version", version, ("small", "large"))
        x, y = npz_arrays(path_of(path, "california_housing.npz"), "x", "y")
        if version == "small":
            x, y = x[:600], y[:600]
        return shuffled_split(x, y, test_split, seed)


class _Bundled:
    """A data set of scikit-learn."""

    _loader: ClassVar[str]
    _rows: ClassVar[str] = "data"

    @classmethod
    def load_data(cls, test_split: float = 0.2, seed: int = 113) -> Split:
        """Returns training rows and test rows from scikit-learn, without a download.

        Args:
          test_split: fraction of the rows for testing.
          seed: seed of the order of rows.

        Raises:
          ImportError: without scikit-learn.

        Source: scikit-learn's `sklearn.datasets`.
        """
        try:
            datasets = importlib.import_module("sklearn.datasets")
        except ImportError as error:
            raise ImportError("This data set comes with scikit-learn. Install it: "
                              "`pip install 'trainer-jax[sklearn]'`.") from error
        found = getattr(datasets, cls._loader)()
        return shuffled_split(found[cls._rows], found.target, test_split, seed)


class breast_cancer(_Bundled):
    """Tumours: 30 measurements of 569 tumours, float64 `(rows, 30)`, and 1 for benign tumours, `(rows,)`."""

    _loader = "load_breast_cancer"


class diabetes(_Bundled):
    """Diabetes: ten scaled measurements of 442 patients, float64 `(rows, 10)`, and the progression in a year."""

    _loader = "load_diabetes"


class digits(_Bundled):
    """Handwritten digits: 1,797 images of numbers from 0 to 16, float64 `(rows, 8, 8)`, and the digits, `(rows,)`."""

    _loader, _rows = "load_digits", "images"


class iris(_Bundled):
    """Irises: four lengths of 150 flowers, float64 `(rows, 4)`, and their three kinds, `(rows,)`."""

    _loader = "load_iris"


class wine(_Bundled):
    """Wines: 13 measurements of 178 wines, float64 `(rows, 13)`, and their three growers, `(rows,)`."""

    _loader = "load_wine"
