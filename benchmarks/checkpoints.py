"""Costs of saving: `python benchmarks/checkpoints.py [--rounds N] [--seconds S]`.

`fit` with and without `BackupAndRestore` take turns. Writes its section of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from hand_written import MLP
from measuring import alternate, table, write_section
from trainer_models import new_model, noise

import trainer
from trainer import distribute
from trainer.callbacks import BackupAndRestore

BATCH_SIZE, SAVES = 32, 10
BAR_PERCENT = 2.0
CASES = {"784-100-10": (MLP((100,)), 1000), "784-2560-2560-10": (MLP((2560, 2560)), 10)}  # with batches of an epoch


class Case:
    """A model and its fits, which all take the same number of steps and go on from wherever the model is.

    Args:
      module: the trained module.
      batches: of an epoch.
      seconds: approximate time of a fit without saves.
    """

    def __init__(self, module: Any, batches: int, seconds: float):
        self._model = new_model(distribute.OneDeviceStrategy(), module, "adam")
        self._data = noise(BATCH_SIZE * batches)
        epochs, took = 1, 0.0
        while took < seconds / 8:
            epochs *= 2
            self._fit(epochs)  # more passes over the data can mean another program, to be compiled
            start = time.perf_counter()
            self._fit(epochs)
            took = time.perf_counter() - start
        self._epochs = max(round(seconds / took * epochs), 1)
        self.steps = self._epochs * batches
        self.save_freq = max(self.steps // SAVES, 1)
        self.saves = self.steps // self.save_freq
        self.blocked: list[float] = []

    def fit(self, number: int) -> None:
        """Trains without saving."""
        self._fit(self._epochs)

    def fit_and_save(self, number: int) -> None:
        """Trains and saves; notes the time that the training thread spent on each save."""
        with tempfile.TemporaryDirectory() as folder:
            history = self._fit(self._epochs, BackupAndRestore(folder, self.save_freq))
        if number:  # the first round warms up
            self.blocked.append(history.timing["checkpoint"] / self.saves)

    def state_bytes(self) -> int:
        """Returns the size of the state in memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._model.state))

    def checkpoint_bytes(self) -> int:
        """Returns the size of the files of one checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            self._fit(1, BackupAndRestore(folder, double_checkpoint=False, delete_checkpoint=False))
            return sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())

    def _fit(self, epochs: int, *callbacks: Any) -> trainer.callbacks.History:
        return self._model.fit(*self._data, BATCH_SIZE, epochs, verbose=0, callbacks=list(callbacks))


def row_of(name: str, case: Case, rounds: int) -> list[str]:
    """Returns a row of the table."""
    timings = alternate({"without": case.fit, "with": case.fit_and_save}, rounds)

    def per_save(clock: str) -> list[float]:
        without, saving = (getattr(timings[each], clock) for each in ("without", "with"))
        return [(more - less) / case.saves for less, more in zip(without, saving, strict=True)]

    medians = {each: statistics.median(timing.seconds) for each, timing in timings.items()}
    of_medians, of_rounds = (medians["with"] - medians["without"]) / case.saves, per_save("seconds")
    worse = max(of_medians, statistics.median(of_rounds))
    return [name, f"{case.state_bytes() / 1e6:.1f}", f"{case.checkpoint_bytes() / 1e6:.1f}",
            f"{medians['without']:.1f}", f"{case.saves}", _with_range(of_rounds, 1000, 0), f"{1000 * of_medians:.0f}",
            f"{1000 * statistics.median(case.blocked):.0f}", f"{1000 * statistics.median(per_save('cpu_seconds')):.0f}",
            _with_range(of_rounds, 100 / 60, 2), "yes" if 100 / 60 * worse < BAR_PERCENT else "no"]


def _with_range(values: list[float], factor: float, digits: int) -> str:
    median, least, most = (f"{factor * value:.{digits}f}" for value in
                           (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {most})"


def main() -> None:
    """Measures, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10, help="what a fit takes, about")
    options = parser.parse_args()
    rows = [row_of(name, Case(*case, options.seconds), options.rounds) for name, case in CASES.items()]
    write_section("What saving costs", f"""
`fit` without callbacks and with `BackupAndRestore`, which saves about {SAVES} times; adam, batch {BATCH_SIZE}. The
state is with the optimizer's. {options.rounds} rounds in turn after a warm-up: `python benchmarks/checkpoints.py`.
What one save costs is the difference of a round over the number of saves, as the median with the least and the most of
the rounds; beside it, that of the medians of both. What such a fit does at its start and end is part of it, and the
last save has no training beside it. Blocked is what the training thread itself spends on it, CPU time what all threads
do. The bar is {BAR_PERCENT:.0f} % at one save a minute.

{table(("model", "state, MB", "checkpoint, MB", "fit, s", "saves", "one save costs, ms", "of medians, ms",
        "blocked, ms", "CPU time, ms", "% at one a minute", "met"), rows)}""")


if __name__ == "__main__":
    main()
