"""Kills `train_and_evaluate` at random and resumes it: `python benchmarks/estimator_crashes.py [--kills N] [--seed S]`.

The trainings are `tests/support/estimator_training.py`, one process on two simulated replicas, and `estimator_job.py`,
two workers and an evaluator. Results that differ in a bit from an undisturbed run are listed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from measuring import write_section

from trainer.testing import Kill, assert_resumes_exactly

SUPPORT = pathlib.Path(__file__).parents[1] / "tests" / "support"
STEPS, SAVES = 30, 6  # of the training


def random_kill(rng: random.Random, processes: int) -> Kill:
    """Returns a moment: after a step, or, of one process, also within a save."""
    if processes == 1 and rng.random() < 0.3:
        return Kill(save=rng.randrange(SAVES - 1), delay_secs=rng.uniform(0, 0.03))
    return Kill(step=rng.randint(1, STEPS - 1), process=rng.randrange(processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, begin = random.Random(options.seed), time.monotonic()
    failures = []
    for script, processes in (("estimator_training.py", 1), ("estimator_job.py", 2)):
        kills = [random_kill(rng, processes) for _ in range(options.kills)]
        try:
            assert_resumes_exactly([sys.executable, str(SUPPORT / script)], kills)
        except AssertionError as error:
            failures.append(f"{script}: {error}")
    print(*failures, sep="\n")
    write_section("Estimators, killed and resumed", f"""
`train_and_evaluate` of {STEPS} steps, saved every 6, with an evaluation and a `BestExporter` at each checkpoint: in one
process on two simulated replicas, and as two workers with an evaluator. Each is killed by SIGKILL at {options.kills}
random moments, after a step of any worker or, in one process, also within a save; then the same command again:
`python benchmarks/estimator_crashes.py --kills {options.kills} --seed {options.seed}`. All arrays of the last
checkpoint and the last evaluation are compared with an undisturbed run, bit by bit. It took
{time.monotonic() - begin:.0f} s.

{"All are equal." if not failures else f"{len(failures)} of 2 trainings gave another result after a kill."}""")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
