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

import matplotlib
import numpy as np
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import callbacks, models

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "run.png"
EPOCHS = 8
WIDTH = 132


def train() -> tuple[dict[str, list[float]], str]:
    """Returns the history of the run and the text that the terminal was sent."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    sent = io.StringIO()
    with trainer.distribute.MirroredStrategy().scope():
        model = trainer.Model(models.CNN(num_classes=10), seed=0)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    bar = callbacks.ProgbarLogger(Console(file=sent, force_terminal=True, width=WIDTH))
    history = model.fit(x, y, epochs=EPOCHS, validation_data=(x_test, y_test), callbacks=[bar])
    return history.history, sent.getvalue()


def lines(sent: str) -> list[str]:
    """Returns the lines of the epochs as the terminal shows them."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", sent)
    return [line.rpartition("\r")[2].rstrip() for line in plain.split("\n") if line.strip()]


def draw(history: dict[str, list[float]], text: list[str]) -> None:
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[0.44, 0.56])
    above.set_facecolor("#14181f")
    above.text(0.012, 0.95, "\n".join(text), family="monospace", size=8.4, color="#d6dde6", va="top", linespacing=1.5)
    panels = below.subplots(1, 2)
    for panel, key in zip(panels, ("loss", "accuracy"), strict=True):
        epochs = range(1, len(history[key]) + 1)
        panel.plot(epochs, history[key], label="training")
        panel.plot(epochs, history[f"val_{key}"], label="validation")
        panel.set(xlabel="epoch", ylabel=key)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    history, sent = train()
    draw(history, ["$ python digits.py", *lines(sent)])


if __name__ == "__main__":
    main()
