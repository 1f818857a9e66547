"""Damages checkpoints at random and resumes: `python benchmarks/corruptions.py [--count N] [--seed S] [--only NUMBER]`.

The training and the verdict are in `tests/damaged_runs.py`, the damage in `tests/corruptions.py`. An outcome other than
the numbers of the undisturbed run or a clear error is printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import pathlib
import random
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from measuring import table, write_section

from tests.support import corruptions, damaged_runs
from tests.support.damaged_runs import NO_TROUBLE, REFUSED, SAME, TROUBLES, WRONG


def possible_troubles() -> list[str]:
    """Returns the troubles with a disk that this process can make."""
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent, "folder")
        folder.mkdir()
        try:
            with corruptions.on_a_small_disk(folder, 4096):
                return list(TROUBLES)
        except (PermissionError, FileNotFoundError):
            return [trouble for trouble in TROUBLES if trouble != "full disk"]


def main() -> None:
    """Damages, prints the mistakes, and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the only corruption to make; writes nothing")
    options = parser.parse_args()
    logging.disable()  # of each run that goes on
    start, training, troubles = time.monotonic(), damaged_runs.Training(), possible_troubles()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    with tempfile.TemporaryDirectory() as parent:
        saved = pathlib.Path(parent, "backup")
        training.interrupt(saved)
        for number in range(options.count) if options.only is None else [options.only]:
            rng = random.Random(f"{options.seed} {number}")
            kind = corruptions.KINDS[number % len(corruptions.KINDS)]
            trouble = NO_TROUBLE if rng.random() < 0.7 else rng.choice(troubles[1:])
            verdict = damaged_runs.judged(training, saved, kind, trouble, rng)
            where = f"damaged: {verdict.where}"
            disk = "disk: good" if trouble == NO_TROUBLE else f"disk: {trouble}"
            counts.update((row, verdict.kind) for row in (kind, where, disk, "all"))
            if verdict.kind == WRONG or options.only is not None:
                print(f"{number}: {kind}, {where}, {disk}: {verdict.kind}. {verdict.text}", flush=True)
    if options.only is not None:
        return
    names = [*corruptions.KINDS, *sorted({row for row, _ in counts} - {*corruptions.KINDS, "all"}), "all"]
    rows = [[name, *(counts[name, kind] for kind in (SAME, REFUSED, WRONG))] for name in names]
    write_section("Damaged and resumed", f"""
A training with BatchNorm, dropout, Adam, ReduceLROnPlateau and EarlyStopping is interrupted and leaves two checkpoints.
A copy of them is damaged at random, and the training is started again; with some disks, saving then fails:
`python benchmarks/corruptions.py --count {options.count} --seed {options.seed}`. The run ends with the numbers of an
undisturbed one, to the bit (state, history, callbacks), after a warning that names the damaged file if the newest
checkpoint is damaged; or with an error that names the folder or the checkpoint, and nothing is lost: if one was whole,
the next start on a good disk gives the same numbers. Whatever else happens is wrong.
It took {time.monotonic() - start:.0f} s.

{table(("damage", "same numbers", "clear error", "wrong"), rows)}""")
    sys.exit(1 if counts["all", WRONG] else 0)


if __name__ == "__main__":
    main()
