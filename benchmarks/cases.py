"""Comparisons: cases of contestants that do the same work, and the reported ratios of their times.

Light on purpose, as the parent of all workers imports it, and workers without JAX: neither JAX nor a peer's library.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# model -> shape of a row of inputs, number of classes
_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mlp": ((784,), 10), "small_mlp": ((8,), 3), "cnn": ((28, 28, 1), 10), "small_cnn": ((8, 8, 1), 10),
    "mobilenet": ((96, 96, 3), 10), "lm": ((64,), 256)}


class Unavailable(Exception):
    """A contestant cannot take part here, for the reason given; the others go on without it."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and data of noise, the same for all contestants of a case: adam, loss and accuracy.

    Attributes:
      model: "mlp" is 784-128-10, "small_mlp" 8-8-3, "small_cnn" half as wide as "cnn", and "lm" a small transformer.
      rows: of the data; a multiple of the batch size.
      batch_size: over all replicas.
      replicas: number of devices: accelerators if there are any, otherwise simulated devices.
    """

    model: str
    rows: int
    batch_size: int
    replicas: int = 1

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self.rows // self.batch_size

    @property
    def classes(self) -> int:
        """How many outputs the model has."""
        return _SHAPES[self.model][1]

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels."""
        rng, (shape, classes) = np.random.default_rng(0), _SHAPES[self.model]
        if self.model == "lm":
            tokens = rng.integers(0, classes, (self.rows, shape[0] + 1)).astype(np.int32)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        return (rng.standard_normal((self.rows, *shape), np.float32),
                rng.integers(0, classes, self.rows).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Who takes part in a case.

    Attributes:
      loop: "module:function". The function takes the workload and `options`, and returns a function that runs a number
        of epochs and waits for the last, or a dict of several functions, of which the fastest in a trial counts. That
        function returns its number of steps or calls, or a dict with the figures of the round.
      epochs: of a round.
      environment: variables of its process, beside those of all.
    """

    loop: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    epochs: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


# On CPUs, with as many threads as there are cores.
PYTORCH = {"PyTorch": "loops_torch:eager", "PyTorch, compiled": "loops_torch:compiled",
           "Lightning": "loops_torch:lightning"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The ratio of two contestants' figures.

    Attributes:
      bar: upper limit of the median.
      less: subtracted from our figure before.
    """

    ours: str
    theirs: str
    bar: float | None = None
    less: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Contestants that take turns.

    Attributes:
      title: of its section.
      text: description of the measurement.
      unit: of a figure: "us" and "ms" per step, "s" or "MB".
      rounds: how many.
      processes: how many a contestant has, one after another, which share the rounds.
      scale: of the epochs of a round where the devices are accelerators.
      wakes: whether an epoch that does not count goes before each turn, as a process that has slept is slow at first.
    """

    title: str
    text: str
    workload: Workload
    contestants: Mapping[str, Contestant]
    comparisons: tuple[Comparison, ...]
    unit: str = "us"
    rounds: int = 5
    processes: int = 1
    scale: int = 1
    wakes: bool = False


def all_cases() -> dict[str, Case]:
    """Returns the cases of all files `cases_*.py`, in the order of the report."""
    topics = ("mlp", "big", "input", "evaluate", "replicas", "start")
    found = {path.stem for path in pathlib.Path(__file__).parent.glob("cases_*.py")}
    assert found == {f"cases_{topic}" for topic in topics}, found
    return {name: case for topic in topics for name, case in importlib.import_module(f"cases_{topic}").CASES.items()}


def find(name: str) -> Case:
    """Returns the case of a name; "module:name" is a case of a module outside of these files."""
    module, _, case = name.rpartition(":")
    return importlib.import_module(module or "cases").all_cases()[case]
