"""A single seed for all random numbers of a script."""

from __future__ import annotations

import random
import sys

import numpy as np

from trainer.core.arguments import as_seed
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.rng import set_default_seed


@explains_arguments
def set_random_seed(seed: int) -> None:
    """Seeds Python's `random`, NumPy, torch and TensorFlow if imported, and all models created later.

    A model without `seed` uses this seed for its initial weights, the order of rows, dropout and all other random
    streams. Keras draws another seed for each layer; here two models created after the same call start with the same
    weights, and `Model(module, seed=1)` starts with others. The weights of an NNX module come from its own `nnx.Rngs`.

    Args:
      seed: integer from 0 to 2**32 - 1.

    Raises:
      TypeError, ValueError: if the seed is not such an integer.

    >>> set_random_seed(0)
    >>> random.randint(0, 100)
    49

    Source: https://keras.io/api/utils/python_utils/#set_random_seed-function.
    """
    seed = as_seed("seed", seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
    set_default_seed(seed)
