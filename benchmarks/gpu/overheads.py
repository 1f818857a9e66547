"""What comes on top of the steps: the first step, memory, callbacks, and gaps between executions."""

from __future__ import annotations

from cases import find
from gpu.context import Context, run_python
from gpu.measured import measure_case

_WHO = ("by hand", "fit")
_ROUNDS = {"resnet50": 2, "gpt2": 1}
_TRACED_EPOCHS = {"resnet50": 8, "gpt2": 4, "784-128-10": 10}
MOST_LONG_GAPS = 0.5  # of 100 us, for each step of a large model: more would be a stall in each


def run(context: Context) -> None:
    """Measures all of it."""
    for name, epochs in _TRACED_EPOCHS.items():
        _trace(context, name, 2 if context.tiny else epochs)
    for name, rounds in _ROUNDS.items():
        _start(context, name, 1 if context.tiny else rounds)
    measure_case(context, "first_step", rounds=3)
    measure_case(context, "callbacks", rounds=5)


def _start(context: Context, name: str, rounds: int) -> None:
    case = f"gpu.cases:{context.prefix}{name}"
    title, found = find(case).title, {who: [] for who in _WHO}
    for number in range(rounds):
        for who in _WHO if number % 2 == 0 else reversed(_WHO):
            found[who].append(run_python("-m", "gpu.fresh", case, who))
    for key, what, unit in (("first_step_secs", "first step", "s"), ("device_megabytes", "peak memory of a GPU", "MB"),
                            ("host_megabytes", "peak memory of the host", "MB")):
        for who, answers in found.items():
            if values := [answer[key] for answer in answers if answer[key] is not None]:
                context.results.figure(title, who, what, values, unit)
        ours, theirs = ([answer[key] for answer in found[who]] for who in ("fit", "by hand"))
        if None not in (*ours, *theirs):
            context.results.compare(title, f"fit, {what}", f"by hand, {what}", ours, theirs)


def _trace(context: Context, name: str, epochs: int) -> None:
    case = f"gpu.cases:{context.prefix}{name}"
    title = find(case).title
    for who in _WHO:
        gaps = run_python("-m", "gpu.trace", case, who, str(epochs))
        for key, what, unit in (("busy_percent", "device busy", "%"), ("idle_us_per_step", "idle for each step", "us"),
                                ("longest_us", "longest gap", "us"),
                                ("long_gaps_per_step", "gaps of 100 us and more", "1/step")):
            context.results.figure(title, who, what, [gaps[key]], unit)
        if who == "fit" and name != "784-128-10" and context.machine.platform != "cpu":
            per_step = gaps["long_gaps_per_step"]
            context.results.check(f"{title}: no stall for each step", per_step < MOST_LONG_GAPS,
                                  f"{per_step:.2f} gaps of 100 us and more for each step")
