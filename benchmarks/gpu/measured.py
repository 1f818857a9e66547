"""A case of `gpu.cases`: its contestants take turns, and their times become results."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Collection, Sequence

from cases import Case, find
from gpu.context import Context
from report import compared, figures
from workers import CACHE_VARIABLE, Outcome, measure

_TRACED = (("busy_percent", "device busy", "%"), ("idle_us_per_step", "idle for each step", "us"),
           ("longest_us", "longest gap", "us"), ("long_gaps_per_step", "gaps of 100 us and more", "1/step"))
MOST_LONG_GAPS = 0.5  # of 100 us, for each step of a large model: more would be a stall in each


def measure_case(context: Context, name: str, rounds: int, traced: Sequence[str] = (),
                 may_fail: Collection[str] = ()) -> None:
    """Measures a case; an interruption keeps the results so far.

    Args:
      context: the machine, and the results to which figures are added.
      name: of the case, in `gpu.cases`.
      rounds: how many, if the context does not say; a dry run has 2.
      traced: the contestants whose gaps are measured.
      may_fail: the contestants that are tried only.

    Raises:
      RuntimeError: if a contestant failed, once the others are done. A contestant that is not installed does not fail.
    """
    name = f"gpu.cases:{context.prefix}{name}"
    case, outcome = find(name), Outcome({}, {})
    large = any(model in name for model in ("mobilenet_v2", "resnet50", "gpt2"))
    case = context.over_all_devices(case) if large else case
    case = dataclasses.replace(case, contestants={
        who: contestant for who, contestant in case.contestants.items() if who not in context.without})
    context.results.note(f"{case.title}: {case.text}")
    if _may_be_cached():
        context.results.note(f"{case.title}: programs came from a cache, so that there are no first steps.")
    try:
        measure(name, case, context.machine, 2 if context.tiny else context.rounds or rounds, None, outcome, traced)
    finally:
        _record(context, case, outcome)
    if failed := [f"{who}: {note}" for who, note in outcome.notes.items() if who not in outcome.rounds
                  and who not in may_fail and not note.startswith("skipped")]:
        raise RuntimeError("; ".join(failed))


def _may_be_cached() -> bool:
    return CACHE_VARIABLE in os.environ


def _record(context: Context, case: Case, outcome: Outcome) -> None:
    results = context.results
    for who, rounds in ((who, outcome.rounds[who]) for who in case.contestants if who in outcome.rounds):
        what = case.title.lower() if "figure" in rounds[0] else "step"
        results.figure(case.title, who, what, figures(rounds, case.unit), case.unit)
        if "rows" in rounds[0]:
            _record_rate(context, case, who, [entry["rows"] / entry["seconds"] for entry in rounds])
            if not _may_be_cached():  # the start has two epochs in it
                secs = [entry["seconds"] / entry["steps"] for entry in rounds]
                results.figure(case.title, who, "first step", [
                    outcome.starts[who] - (2 * case.workload.steps - 1) * statistics.median(secs)], "s")
        if "peak_megabytes" in rounds[0]:
            results.figure(case.title, who, "peak memory of a GPU", [rounds[-1]["peak_megabytes"]], "MB")
    for who, found in outcome.traces.items():
        if "untraced" in found:
            results.check(f"{case.title}, {who}: traced", False, found["untraced"])
            continue
        for key, what, unit in _TRACED:
            results.figure(case.title, who, what, [found[key]], unit)
        if who == "fit" and "rows" in outcome.rounds[who][0] and context.machine.platform != "cpu":
            results.check(f"{case.title}: no stall for each step", found["long_gaps_per_step"] < MOST_LONG_GAPS)
    for entry in compared(case, outcome):
        results.ratio(case.title, entry)
    for who, note in outcome.notes.items():
        results.note(f"{case.title}, {who}: {note}.")


def _record_rate(context: Context, case: Case, who: str, rows_per_sec: list[float]) -> None:
    sizes = case.workload.transformer
    if sizes is None:
        context.results.figure(case.title, who, "rate", rows_per_sec, "images/s")
        return
    tokens_per_sec = [rate * sizes.tokens for rate in rows_per_sec]
    context.results.figure(case.title, who, "rate", tokens_per_sec, "tokens/s")
    if context.peak_flops:
        peak = context.peak_flops * context.machine.devices
        context.results.figure(case.title, who, "model FLOP utilisation",
                               [100 * rate * sizes.flops_per_token / peak for rate in tokens_per_sec], "%")
