"""A strategy of several processes against one device: `python in_processes.py STRATEGY [ARGUMENT=NUMBER ...]`."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from gpu import small_models

from trainer import distribute
from trainer.testing import assert_strategies_equal


def _train(strategy, model, data):
    logs = model.fit(*data, batch_size=16, epochs=2, verbose=0).history
    return {name: values for name, values in logs.items() if name != "staleness"}  # which one device has not


def main() -> None:
    """Trains under both."""
    name, *given = sys.argv[1:]
    options = {key: int(value) for key, value in (argument.split("=") for argument in given)}
    strategy = getattr(distribute, name)(**options)
    try:
        assert_strategies_equal(lambda: small_models.new_model("mlp"), small_models.data("mlp", 90), [strategy],
                                batch_size=16, train=_train)
    finally:
        getattr(strategy, "close", lambda: None)()


if __name__ == "__main__":
    main()
