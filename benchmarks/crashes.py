"""Kills trainings at random moments and resumes them: `python benchmarks/crashes.py [--kills N] [--seed S] [--jobs J]`.

Each training is `tests/support/crash_training.py`, over modules, data, replicas and steps per execution, with
`--processes 2` as jobs of two processes. Results that differ in a bit from an undisturbed run are listed; the exit
code is then 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import random
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from measuring import table, write_section

from trainer.testing import Kill, assert_resumes_exactly

SCRIPT = pathlib.Path(__file__).parents[1] / "tests" / "support" / "crash_training.py"
CASES = {
    1: list(itertools.product(("linen", "nnx", "custom"), ("arrays", "grain", "generator"), ("1", "4"), ("auto", "1"))),
    # Processes x devices of each.
    2: [("linen", "arrays", "2x1", "auto"), ("nnx", "grain", "2x1", "1"), ("linen", "generator", "2x2", "1"),
        ("nnx", "arrays", "2x2", "auto"), ("linen", "grain", "2x2", "auto"), ("custom", "arrays", "2x2", "auto")],
}
MODULES_AND_DATA = ("over Linen and NNX modules with BatchNorm and dropout,\nand a custom step that mixes rows and "
                    "clips, on arrays, Grain and a generator")
# The counted kills, as process and signal.
COLUMNS = {
    1: {"times": (0, signal.SIGKILL)},
    2: {f"process {process}{name}": (process, number)
        for name, number in (("", signal.SIGKILL), (", SIGTERM", signal.SIGTERM)) for process in (0, 1)},
}
STEPS, VALIDATION_BATCHES, SAVES = 39, 6, 7  # of the script, at least
LAST_STEP_TO_SIGNAL = 12  # the processes of a job agree on a step soon after the signal, which must exist


def random_kill(rng: random.Random, processes: int) -> Kill:
    """Returns a moment of the training: most are steps, a quarter are within a save, in a job some are by SIGTERM."""
    kinds = ("step", "step", "validation", "save")
    kind = rng.choice(kinds if processes == 1 else (*kinds, "SIGTERM"))
    process = rng.randrange(processes) if processes > 1 else 0
    if kind == "SIGTERM":
        return Kill(step=rng.randint(1, LAST_STEP_TO_SIGNAL), process=process, signal=signal.SIGTERM)
    if kind == "save":
        return Kill(save=rng.randrange(SAVES), delay_secs=rng.uniform(0, 0.06), process=process)
    return Kill(**{kind: rng.randint(1, STEPS if kind == "step" else VALIDATION_BATCHES)}, process=process)


def command(case: tuple[str, ...]) -> list[str]:
    """Returns the command of a training."""
    processes, _, _ = case[2].rpartition("x")
    launcher = ["-m", "trainer.launch", "--workers", processes] if processes else []
    return [sys.executable, *launcher, str(SCRIPT), *case]


def failure(case: tuple[str, ...], kills: list[Kill]) -> str:
    """Returns the mistakes after any of the kills; empty if there are none."""
    try:
        assert_resumes_exactly(command(case), kills)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> None:
    """Kills, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many trainings at once")
    parser.add_argument("--processes", type=int, default=1, choices=sorted(CASES), help="of each training")
    options = parser.parse_args()
    cases, rng, start = CASES[options.processes], random.Random(options.seed), time.monotonic()
    kills: list[list[Kill]] = [[] for _ in cases]
    for number in range(options.kills):
        kills[number % len(cases)].append(random_kill(rng, options.processes))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        failures = list(pool.map(failure, cases, kills))
    for case, text in zip(cases, failures, strict=True):
        if text:
            print(" ".join(case), text, sep="\n", flush=True)
    everything = list(itertools.chain(*kills))
    moments = {name: [kill for kill in everything if getattr(kill, name) is not None]
               for name in ("step", "validation", "save")}
    columns = COLUMNS[options.processes]
    rows = [(name, *(sum((kill.process, kill.signal) == column for kill in found) for column in columns.values()))
            for name, found in moments.items()]
    given = f"--kills {options.kills} --seed {options.seed}"
    title, how, what = {
        1: ("Killed and resumed", "`kill -9`", f"trainings {MODULES_AND_DATA}, 1 and 4 simulated replicas"),
        2: ("Jobs of two processes, killed and resumed", "`kill -9` of one process, or SIGTERM to it,",
            f"jobs {MODULES_AND_DATA}, 1 and 2 simulated devices a process"),
    }[options.processes]
    given += f" --processes {options.processes}" * (options.processes > 1)
    write_section(title, f"""
{how} at {len(everything)} random moments of {what}, fused and single steps, which save every 5 steps; then the
same command again: `python benchmarks/crashes.py {given}`. Weights, optimizer
state, history, callback state and the CSV log are compared with an undisturbed run, bit by bit.
It took {time.monotonic() - start:.0f} s.

{table(("killed after or within", *columns), rows)}
Of {len(cases)} kinds of training, {sum(map(bool, failures))} gave another result after a kill.""")
    sys.exit(1 if any(failures) else 0)


if __name__ == "__main__":
    main()
