"""The results as Markdown, JSON and a chart."""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

from cases import Case
from measuring import Ratio, table, write_section
from workers import Machine, Outcome

_FOLDER = pathlib.Path(__file__).parent
JSON, CHART = _FOLDER / "results.json", _FOLDER / "results.svg"
# The bars of the chart: of the cases against each other contestant.
_DRAWN = {
    "by hand": {"small_mlp": "MLP 8-8-3", "mlp": "MLP 784-128-10", "small_cnn": "CNN, 8x8", "cnn": "CNN, 28x28",
                "lm": "transformer, 2 layers", "mobilenet": "MobileNetV2, 96x96"},
    "Keras on JAX": {"mlp": "MLP 784-128-10", "cnn": "CNN, 28x28", "lm": "transformer, 2 layers",
                     "mobilenet": "MobileNetV2, 96x96"},
}
_WORDS = {"by hand": "a jitted loop by hand", "Keras on JAX": "Keras on JAX"}
_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0, "MB": 1.0}


def figures(rounds: list[dict[str, float]], unit: str) -> list[float]:
    """Returns a figure per round: the round's own figure, or else the time of a step."""
    return [entry["figure"] if "figure" in entry else entry["seconds"] / entry["steps"] * _SCALES[unit]
            for entry in rounds]


def compared(case: Case, outcome: Outcome) -> list[dict[str, Any]]:
    """Returns an entry for each comparison whose contestants both finished a round."""
    entries = []
    for comparison in case.comparisons:
        ours, theirs = (figures(outcome.rounds.get(name, []), case.unit)
                        for name in (comparison.ours, comparison.theirs))
        if not ours or not theirs:
            continue
        rounds = min(len(ours), len(theirs))  # either may have failed halfway
        ratio = Ratio.of([figure - comparison.less for figure in ours[:rounds]], theirs[:rounds])
        entries.append({
            "ours": comparison.ours, "theirs": comparison.theirs, "median": ratio.median, "least": ratio.of_rounds[0],
            "most": ratio.of_rounds[-1], "rounds": rounds, "bar": comparison.bar,
            "met": None if comparison.bar is None else ratio.median <= comparison.bar})
    return entries


def write(name: str, case: Case, machine: Machine, outcome: Outcome) -> None:
    """Writes the results of a case into `RESULTS.md`, `results.json` and the chart, which has ten bars."""
    entries = compared(case, outcome)
    stored, where = _stored(), machine.described(case.workload.replicas)
    stored[name] = {"title": case.title, "machine": where, "unit": case.unit, "comparisons": entries,
                    "rounds": outcome.rounds, "notes": outcome.notes}
    JSON.write_text(json.dumps(stored, indent=1) + "\n")
    write_section(case.title, _section(name, case, outcome, entries), where)
    _draw(stored)


def show(name: str, case: Case, machine: Machine, outcome: Outcome) -> None:
    """Prints the results of a case."""
    print(f"## {case.title}\n\n{_section(name, case, outcome, compared(case, outcome))}")


def _stored() -> dict[str, Any]:
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def _section(name: str, case: Case, outcome: Outcome, entries: list[dict[str, Any]]) -> str:
    unit = case.unit if case.unit in ("s", "MB") else f"{case.unit}/step"
    medians = {who: _spread(figures(rounds, case.unit)) for who, rounds in outcome.rounds.items()}
    ratios = [[f"{entry['ours']} / {entry['theirs']}",
               f"{entry['median']:.2f} ({entry['least']:.2f} to {entry['most']:.2f})",
               "" if entry["bar"] is None else entry["bar"],
               {None: "", True: "yes", False: "**no**"}[entry["met"]]] for entry in entries]
    absent = [f"{who}: {note}" for who, note in outcome.notes.items() if who not in medians]
    rounds = max((len(entries) for entries in outcome.rounds.values()), default=0)
    processes = min(case.processes, rounds)
    shared = f", over {processes} processes of each" if processes > 1 else ""
    parts = [
        f"{case.text} {rounds} rounds in turn after a warm-up{shared}: `python benchmarks/run.py {name}`.\n",
        table(["contestant", f"{unit}, median (least to most)", "note"],
              [[who, median, outcome.notes.get(who, "")] for who, median in medians.items()]),
        table(["ratio", "median (least to most)", "bar", "met"], ratios) if ratios else "",
        "".join(f"- {text}\n" for text in absent)]
    return "\n".join(part for part in parts if part)


def _spread(values: list[float]) -> str:
    digits = 0 if max(values) >= 100 else 1 if max(values) >= 10 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _draw(stored: dict[str, Any]) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("No chart: matplotlib is not installed.")
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "results", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    rows = [(label, theirs, entry) for theirs, cases in _DRAWN.items() for name, label in cases.items()
            for entry in stored.get(name, {}).get("comparisons", [])
            if (entry["ours"], entry["theirs"]) == ("fit", theirs)]
    figure, axes = pyplot.subplots(figsize=(8, 0.36 * len(rows) + 1.4), layout="constrained")
    for theirs, color in zip(_DRAWN, ("tab:blue", "tab:orange"), strict=True):
        places = [place for place, row in enumerate(rows) if row[1] == theirs]
        entries = [rows[place][2] for place in places]
        axes.barh(places, [entry["median"] for entry in entries], color=color, alpha=0.75, height=0.7,
                  label=f"against {_WORDS[theirs]}")
        axes.hlines(places, [entry["least"] for entry in entries], [entry["most"] for entry in entries],
                    color="black", linewidth=1)
        for place, entry in zip(places, entries, strict=True):
            axes.text(max(entry["most"], 0.02) + 0.02, place, f"{entry['median']:.2f}", va="center",
                      bbox={"color": "white", "pad": 1})
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set(xlim=(0, 1.4), ylim=(len(rows) - 0.4, -0.6), yticks=range(len(rows)), yticklabels=[row[0] for row in rows],
             xlabel="time of a step of fit, divided by that of the other; below 1 is faster")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    figure.savefig(CHART, metadata={"Date": None})
    pyplot.close(figure)
