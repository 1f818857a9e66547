"""`python -m trainer doctor`: whether this machine, or this process of a cluster, can train.

Owns the order of the checks and the exit code. Each check catches what it expects to go wrong; it joins no cluster and
changes nothing on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from trainer.tools.command_line import installed, machine, network
from trainer.tools.command_line.findings import Finding, as_text

HAS_PROBLEMS = 1


def run(timeout_secs: float, as_json: bool) -> int:
    """Prints what was found, and returns the exit code: 1 if there is a problem."""
    findings = list(examine(timeout_secs))
    problems = [finding for finding in findings if finding.status == "problem"]
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings], "healthy": not problems}, indent=2))
    else:
        print(as_text(findings))
        print(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}." if problems else "All is well.")
    return HAS_PROBLEMS if problems else 0


def examine(timeout_secs: float) -> Iterator[Finding]:
    """Yields what all checks find.

    Args:
      timeout_secs: how long to wait for each other machine of a cluster.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        installed.versions, machine.devices, machine.memory, lambda: network.cluster(timeout_secs),
        machine.compile_cache, installed.extras]
    for check in checks:
        yield from check()
