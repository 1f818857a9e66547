"""`python -m trainer doctor`: whether this machine, or this process of a cluster, can train.

Owns the order of the checks and the exit code. Each check catches expected errors; any other error is a finding too.
They join no cluster and change nothing on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from trainer.tools.command_line import installed, machine, network
from trainer.tools.command_line.findings import Finding, as_text

HAS_PROBLEMS = 1


def run(timeout_secs: float, as_json: bool) -> int:
    """Prints the findings, and returns the exit code: 1 if there is a problem."""
    findings = list(examine(timeout_secs))
    problems = [finding for finding in findings if finding.status == "problem"]
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings], "healthy": not problems}, indent=2))
    else:
        print(as_text(findings))
        print(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}." if problems else "All is well.")
    return HAS_PROBLEMS if problems else 0


def examine(timeout_secs: float) -> Iterator[Finding]:
    """Yields the findings of all checks, waiting at most `timeout_secs` for each other machine of a cluster."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": installed.versions, "devices": machine.devices, "memory": machine.memory,
        "cluster": lambda: network.cluster(timeout_secs), "compile cache": machine.compile_cache,
        "optional packages": installed.extras}
    for section, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # without JAX, for example, the other checks are even more useful
            yield Finding(section, "check", "problem", f"cannot be made: {type(error).__name__}: {error}")
