"""A case of `gpu.cases`: its contestants take turns, and what they took becomes results."""

from __future__ import annotations

from cases import find
from gpu.context import Context
from report import compared, figures
from workers import Outcome, measure


def measure_case(context: Context, name: str, rounds: int) -> None:
    """Measures a case; what is there when it is interrupted is kept.

    Raises:
      RuntimeError: if a contestant failed, once the others are done. One that is not installed does not fail.
    """
    name = f"gpu.cases:{context.prefix}{name}"
    case, outcome = find(name), Outcome({}, {})
    large = name.endswith(("mobilenet_v2", "resnet50", "gpt2"))
    case = context.over_all_devices(case) if large else case
    try:
        measure(name, case, context.machine, 2 if context.tiny else rounds, None, outcome)
    finally:
        _record(context, case, outcome)
    if failed := [f"{who}: {note}" for who, note in outcome.notes.items() if who not in outcome.rounds
                  and not note.startswith("skipped")]:
        raise RuntimeError("; ".join(failed))


def _record(context: Context, case, outcome: Outcome) -> None:
    results = context.results
    for who, rounds in outcome.rounds.items():
        results.figure(case.title, who, "step", figures(rounds, case.unit), case.unit)
        if all("rows" in entry for entry in rounds):
            _record_rate(context, case, who, [entry["rows"] / entry["seconds"] for entry in rounds])
    for entry in compared(case, outcome):
        results.ratio(case.title, entry)
    for who, note in outcome.notes.items():
        results.note(f"{case.title}, {who}: {note}.")


def _record_rate(context: Context, case, who: str, rows_per_sec: list[float]) -> None:
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
