"""Code that the benchmarks share: rounds that alternate, the ratios of a round, and the sections of `RESULTS.md`.

The machine may be shared and noisy. So the contestants of a comparison take turns in one process, the ratio of each
round counts, and the quoted figure is the median of these ratios, with the least and the most.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax
import optax

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
_TITLE = ("# Results\n\nWritten by `make bench`, and by the commands that are named in other sections. The machine is "
          "shared and noisy: the\nratios count, not the seconds.\n")


@dataclasses.dataclass(frozen=True)
class Timings:
    """The times of the rounds of a contestant.

    Attributes:
      seconds: by the clock, one entry per round.
      cpu_seconds: of all threads of the process, likewise. Other processes disturb it less.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Ratios of two contestants' times, round by round, in ascending order."""

    of_rounds: tuple[float, ...]

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Returns the ratios of the times of the same rounds."""
        return cls(tuple(sorted(mine / other for mine, other in zip(ours, theirs, strict=True))))

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.of_rounds)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.of_rounds[0]:.2f} to {self.of_rounds[-1]:.2f})"


def alternate(contestants: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, Timings]:
    """Returns the times of each contestant in each round; a round before the first, not counted, compiles.

    Args:
      contestants: functions of the number of the round, from 0, that return when their work is done.
      rounds: number of rounds. Each starts with another contestant, so that none always follows the same contestant.
    """
    timings = {name: Timings() for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            cpu_start, start = time.process_time(), time.perf_counter()
            contestants[name](number)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            if number:
                timings[name].seconds.append(seconds)
                timings[name].cpu_seconds.append(cpu_seconds)
    return timings


def contenders(contestants: Mapping[str, Callable[[int], Any]], trials: int = 4) -> list[str]:
    """Returns the names of those whose trials take less than twice as long as the fastest's: others waste time."""
    medians = {name: statistics.median(timing.seconds) for name, timing in alternate(contestants, trials).items()}
    return [name for name, seconds in medians.items() if seconds < 2 * min(medians.values())]


def fastest(timings: Mapping[str, Timings], names: Sequence[str]) -> str:
    """Returns which of some contestants has the shortest median round."""
    return min(names, key=lambda name: statistics.median(timings[name].seconds))


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def environment() -> str:
    """Returns a sentence on the machine, the devices and the versions, with today's date."""
    devices = jax.devices()
    count = f"{len(devices)} devices" if len(devices) > 1 else "one device"
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, flax, optax))
    return (f"{datetime.date.today()}: {platform.machine()}, {os.cpu_count()} cores, {count} of kind "
            f"{devices[0].device_kind};\nPython {platform.python_version()}, {versions}.\n")


def write_section(title: str, body: str, machine: str | None = None) -> None:
    """Prints a section and puts it into `RESULTS.md`, in place of an older section of this title or at the end.

    Args:
      title: of the section.
      body: in Markdown.
      machine: return value of `environment` in the process that measured, by default this process.
    """
    section = f"## {title}\n\n{machine or environment()}\n{body.strip()}\n"
    print(section, flush=True)
    written = RESULTS.read_text() if RESULTS.exists() else ""
    others = {found[1]: found[0].strip() for found in re.finditer(r"(?ms)^## (.*?)\n.*?(?=^## |\Z)", written)}
    others[title] = section.strip()
    RESULTS.write_text("\n".join([_TITLE, *(f"{text}\n" for text in others.values())]))
