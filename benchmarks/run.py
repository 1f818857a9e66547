"""Runs the cases that are named, all by default: `python benchmarks/run.py [CASE ...] [--rounds N] [--quick]`.

Writes `RESULTS.md`, `results.json` and `results.svg` after each case, so that an interruption loses no other.
"""

from __future__ import annotations

import argparse
import time

import report
from cases import all_cases
from workers import Machine, Outcome, measure


def main() -> None:
    """Measures and writes."""
    known = all_cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(known)}; all by default")
    parser.add_argument("--rounds", type=int, help="of each case, instead of its own number")
    parser.add_argument("--quick", action="store_true", help="2 rounds of at most 2 epochs, printed and not written")
    options = parser.parse_args()
    if unknown := sorted(set(options.cases) - set(known)):
        parser.error(f"unknown cases: {', '.join(unknown)}; known are {', '.join(known)}")
    machine = Machine.probe()
    for name in options.cases or known:
        case, outcome, start = known[name], Outcome({}, {}), time.monotonic()
        if machine.platform != "cpu" and machine.devices < case.workload.replicas:
            print(f"{name}: skipped, as it needs {case.workload.replicas} devices\n", flush=True)
            continue
        try:
            rounds = options.rounds or (2 if options.quick else case.rounds)
            measure(name, case, machine, rounds, 2 if options.quick else None, outcome)
        finally:
            if outcome.rounds:
                (report.show if options.quick else report.write)(name, case, machine, outcome)
            print(f"{name}: {time.monotonic() - start:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
