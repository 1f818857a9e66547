"""Draws the picture of the README, docs/run.png: the progress bar and the learning curves of a run on digits.

`python benchmarks/picture.py`, on four simulated devices.
"""

from __future__ import annotations

import io
import os
import pathlib
import re

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.pop("CI", None)  # with it no bar is drawn

import numpy as np
from rich.console import Console

import trainer
from trainer import callbacks, models

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "run.png"
EPOCHS = 8
WIDTH = 132


def train() -> tuple[callbacks.History, str]:
    """Returns the history of the run and the text that the terminal was sent."""
    (x, y), (x_test, y_test) = trainer.datasets.digits.load_data()
    x, x_test = ((images / 16).astype(np.float32)[..., None] for images in (x, x_test))
    sent = io.StringIO()
    with trainer.distribute.MirroredStrategy().scope():
        model = trainer.Model(models.CNN(num_classes=10), seed=0)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    bar = callbacks.ProgbarLogger(Console(file=sent, force_terminal=True, width=WIDTH))
    history = model.fit(x, y, epochs=EPOCHS, validation_data=(x_test, y_test), callbacks=[bar])
    return history, sent.getvalue()


def lines(sent: str) -> list[str]:
    """Returns the lines of the epochs as the terminal shows them."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", sent)
    return [line.rpartition("\r")[2].rstrip() for line in plain.split("\n") if line.strip()]


def main() -> None:
    history, sent = train()
    figure = history.plot("loss", "accuracy")
    figure.set_size_inches(11, 4.6)
    figure.get_layout_engine().set(h_pad=0.12)  # inches, below the text too
    figure.suptitle("\n".join([r"\$ python digits.py", *lines(sent)]), x=0.01, ha="left",
                    family="monospace", size=8.4, color="#d6dde6", linespacing=1.5,
                    bbox={"facecolor": "#14181f", "edgecolor": "none", "pad": 5})
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
