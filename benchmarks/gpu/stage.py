"""The process of a stage: `python -m gpu.stage NAME RESULTS.json MACHINE ROUNDS WITHOUT [--tiny]`.

MACHINE and WITHOUT, the contestants that are left out, are JSON; 0 rounds are each case's own.
"""

from __future__ import annotations

import json
import pathlib
import signal
import sys

from gpu.context import Context
from gpu.results import Results
from gpu.stages import STAGES
from workers import Machine


def main() -> None:
    """Runs the stage; fails as it does."""
    name, path, described, rounds, without, *options = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by the time limit"))  # which ends the workers
    found = json.loads(described)
    machine = Machine(found["platform"], found["devices"], found["text"])
    STAGES[name].run(Context(machine, found["device_kind"], "--tiny" in options,
                             Results(pathlib.Path(path)), int(rounds) or None, tuple(json.loads(without))))


if __name__ == "__main__":
    main()
