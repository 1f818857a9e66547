"""A training of a small model that may be killed: `python training.py MODEL`. It writes `result.npz`."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np
from gpu import small_models

import trainer
from trainer import callbacks


def main() -> None:
    """Trains, and writes the weights and the losses."""
    name = sys.argv[1]
    options = {"precision": "mixed_bfloat16"} if name == "lm" else {}
    model = small_models.new_model(name, deterministic=True, **options)
    history = model.fit(*small_models.data(name, 90), batch_size=16, epochs=3, verbose=0, callbacks=[
        callbacks.BackupAndRestore("backup", save_freq=2), trainer.testing.kill_at()])
    np.savez("result.npz", *model.get_weights(), losses=history.history["loss"])


if __name__ == "__main__":
    main()
