"""Kills trainings at random moments and resumes them: `python benchmarks/crashes.py [--kills N] [--seed S] [--jobs J]`.

Each training is `tests/crash_training.py`, over modules, data, replicas and steps per execution. What differs in a bit
from an undisturbed run is listed, and the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import random
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from measuring import table, write_section

from trainer.testing import Kill, assert_resumes_exactly

SCRIPT = pathlib.Path(__file__).parents[1] / "tests" / "crash_training.py"
CASES = list(itertools.product(("linen", "nnx"), ("arrays", "grain", "generator"), ("1", "4"), ("auto", "1")))
STEPS, VALIDATION_BATCHES, SAVES = 39, 6, 7  # of the script, at least


def random_kill(rng: random.Random) -> Kill:
    """Returns a moment of the training: most are steps, a quarter are within a save."""
    kind = rng.choice(("step", "step", "validation", "save"))
    if kind == "save":
        return Kill(save=rng.randrange(SAVES), delay_secs=rng.uniform(0, 0.06))
    return Kill(**{kind: rng.randint(1, STEPS if kind == "step" else VALIDATION_BATCHES)})


def failure(case: tuple[str, ...], kills: list[Kill]) -> str:
    """Returns what is wrong after any of the kills; empty if nothing is."""
    try:
        assert_resumes_exactly([sys.executable, str(SCRIPT), *case], kills)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> None:
    """Kills, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rng, start = random.Random(options.seed), time.monotonic()
    kills: list[list[Kill]] = [[] for _ in CASES]
    for number in range(options.kills):
        kills[number % len(CASES)].append(random_kill(rng))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        failures = list(pool.map(failure, CASES, kills))
    for case, text in zip(CASES, failures, strict=True):
        if text:
            print(" ".join(case), text, sep="\n", flush=True)
    everything = list(itertools.chain(*kills))
    rows = [(name, sum(getattr(kill, name) is not None for kill in everything)) for name in
            ("step", "validation", "save")]
    write_section("Killed and resumed", f"""
`kill -9` at {len(everything)} random moments of trainings over Linen and NNX modules with BatchNorm and dropout,
arrays, Grain and a generator, 1 and 4 simulated replicas, fused and single steps, which save every 5 steps; then the
same command again: `python benchmarks/crashes.py --kills {options.kills} --seed {options.seed}`. Weights, optimizer
state, history, callback state and the CSV log are compared with an undisturbed run, bit by bit.
It took {time.monotonic() - start:.0f} s.

{table(("killed after or within", "times"), rows)}
Of {len(CASES)} kinds of training, {sum(map(bool, failures))} gave another result after a kill.""")
    sys.exit(1 if any(failures) else 0)


if __name__ == "__main__":
    main()
