"""Gaps in a device's work while a model trains, from a trace of JAX's profiler."""

from __future__ import annotations

import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

LONG_SECS = 100e-6  # a gap that a step's dispatch would leave, if the device waited for it

Interval = tuple[float, float]


class Gaps(NamedTuple):
    """The gaps between a device's work, in the middle half of a trace.

    Attributes:
      busy_percent: the part of the time in which a kernel runs.
      idle_us_per_step: microseconds without a kernel, for each step.
      longest_us: the longest gap.
      long_gaps_per_step: gaps of 100 us and more, for each step.
    """

    busy_percent: float
    idle_us_per_step: float
    longest_us: float
    long_gaps_per_step: float


def gaps(intervals: Iterable[Interval], steps: int) -> Gaps:
    """Returns the gaps between intervals of work, in seconds, of a trace of so many steps.

    Only the middle half of the time counts, which has half the steps: the begin and the end of a run are not steady.

    >>> gaps([(0, 1), (0.5, 1.5), (3, 5), (6, 8)], steps=4)
    Gaps(busy_percent=50.0, idle_us_per_step=1000000.0, longest_us=1000000.0, long_gaps_per_step=1.0)
    """
    merged = _merged(intervals)
    begin, end = merged[0][0], merged[-1][1]
    first, last = begin + (end - begin) / 4, end - (end - begin) / 4
    between = [(max(one[1], first), min(other[0], last)) for one, other in itertools.pairwise(merged)]
    idle = [stop - start for start, stop in between if stop > start]
    half = steps / 2
    return Gaps(100 * (1 - sum(idle) / (last - first)), 1e6 * sum(idle) / half, 1e6 * max(idle, default=0.0),
                sum(gap >= LONG_SECS for gap in idle) / half)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns intervals in order that do not overlap."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def work_of(profile: Any, platform: str) -> list[Interval]:
    """Returns when the first device of a `jax.profiler.ProfileData` ran something, in seconds.

    The work is all that its streams ran: kernels and copies. On a CPU, it is the work of XLA's threads.

    Args:
      profile: the recorded profile.
      platform: of the devices, as JAX has it.

    Raises:
      ValueError: if there is nothing, as where the driver lets only administrators profile.
    """
    planes = {plane.name: plane for plane in profile.planes}
    if platform == "cpu":
        lines = [line for line in planes["/host:CPU"].lines if line.name.startswith("tf_XLA")]
    else:
        devices = sorted(name for name in planes if name.startswith("/device:GPU"))
        lines = [line for name in devices[:1] for line in planes[name].lines]
        lines = [line for line in lines if line.name.startswith("Stream")] or lines
    found = [(event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9)
             for line in lines for event in line.events
             if not event.name.startswith(("Threadpool", "end: ", "ThunkExecutor"))]
    if not found:
        raise ValueError(f"The profile has no work of a device. Its planes: {', '.join(planes)}.")
    return found


def trace(run: Callable[[int], Any], epochs: int) -> Gaps:
    """Returns the gaps while a contestant, which has compiled all, trains for so many epochs."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        result = run(epochs)
        jax.profiler.stop_trace()
        file, = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        return gaps(work_of(profile, jax.default_backend()), result["steps"] if isinstance(result, dict) else result)
