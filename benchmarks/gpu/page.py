"""`GPU.md`, from the results in JSON."""

from __future__ import annotations

from typing import Any

from gpu.cases import HAND_BAR, SMALL_BARS
from gpu.measured import MOST_LONG_GAPS
from gpu.stages import STAGES
from measuring import table

NOT_YET = "**Not yet run on a GPU.**"


def render(stored: dict[str, dict[str, Any]]) -> str:
    """Returns the page.

    Args:
      stored: content of the JSON file: by stage, its "machine", "seconds", "error" and results.
    """
    on_gpus = any(entry["machine"]["platform"] == "gpu" for entry in stored.values())
    states = [] if on_gpus else [NOT_YET]
    if stored and not on_gpus:
        states.append("What follows is a dry run with tiny sizes: it says that the suite works, and nothing of speed.")
    parts = [f"""# On GPUs

{" ".join(states) or "Written by `make bench-gpu`, stage by stage."}

`make bench-gpu` measures on the GPUs of this machine, one or several, in less than 25 minutes, and writes this page and
`gpu.json`. In an environment that has JAX for GPUs, `python benchmarks/bench_gpu.py [STAGE ...]` does the same, and
runs some stages alone, each in less than 8 minutes. `--tiny` is a dry run, on a CPU too. `CUDA_VISIBLE_DEVICES=0`
leaves it one GPU. A stage that fails stops no other. Times are medians of interleaved rounds; contestants have a
process each.

{table(["stage", "what it measures", "at most"], [[f"`{name}`", stage.text, f"{stage.limit_secs:.0f} s"]
                                                  for name, stage in STAGES.items()])}
The bars:

- ResNet-50 and the transformer: `fit` takes at most {HAND_BAR} times as long as the loop by hand.
- 8-8-3: at most {SMALL_BARS["by hand"]} of the loop by hand, and {SMALL_BARS["Keras on JAX"]} of Keras on JAX.
- Resume is bit-equal with `deterministic=True`, and so are fused and single steps.
- No stall for each step: a trace of a large model has fewer than {MOST_LONG_GAPS} gaps of 100 us and more for each
  step.
"""]
    return "\n".join(parts + [_section(name, stored[name]) for name in STAGES if name in stored])


def _section(name: str, entry: dict[str, Any]) -> str:
    machine, parts = entry["machine"], [f"## {name}\n"]
    parts.append(f"{machine['text'].strip()} Commit {machine['commit']}; {entry['seconds']:.0f} s"
                 f"{', a dry run' if entry['tiny'] else ''}.\n")
    if entry["error"]:
        parts.append(f"**Failed:** {_cell(entry['error'])}\n")
    if checks := entry["checks"]:
        parts.append(table(["check", "passed", "detail"], [
            [_cell(check["name"]), "yes" if check["passed"] else "**no**", _cell(check["detail"])]
            for check in checks]))
    if figures := entry["figures"]:
        parts.append(table(["case", "contestant", "figure", "median (least to most)", "unit"], [
            [figure["case"], figure["who"], figure["what"], _spread(figure), figure["unit"]] for figure in figures]))
    if ratios := entry["ratios"]:
        parts.append(table(["case", "ratio", "median (least to most)", "bar", "met"], [
            [ratio["case"], f"{ratio['ours']} / {ratio['theirs']}",
             f"{ratio['median']:.3g} ({ratio['least']:.3g} to {ratio['most']:.3g})",
             "" if ratio["bar"] is None else ratio["bar"], {None: "", True: "yes", False: "**no**"}[ratio["met"]]]
            for ratio in ratios]))
    if entry["notes"]:
        parts.append("".join(f"- {_cell(note['text'])}\n" for note in entry["notes"]))
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Returns a text as a single line that breaks no table."""
    return " ".join(text.split()).replace("|", "\\|")[:600]


def _spread(figure: dict[str, Any]) -> str:
    value, least, most = (f"{figure[name]:,.4g}" if abs(figure[name]) < 1e4 else f"{figure[name]:,.0f}"
                          for name in ("value", "least", "most"))
    return value if figure["rounds"] == 1 else f"{value} ({least} to {most})"
