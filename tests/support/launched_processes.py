"""Processes that a cluster's launcher would start, without it: its environment variables are set instead."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping


def variables_setter(monkeypatch, launched: Mapping[str, str]) -> Callable[..., None]:
    """Returns a function that sets a launcher's variables and no other's, with changes; None removes a variable."""

    def set_variables(**changes: str | None) -> None:
        for name in [name for name in os.environ if name.startswith(("SLURM_", "JAX_COORDINATOR_", "OMPI_", "PMIX_"))]:
            monkeypatch.delenv(name)
        monkeypatch.delenv("TF_CONFIG", raising=False)
        for name, value in {**launched, **changes}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_variables


def outputs_of(script: str, environments: Iterable[Mapping[str, str]]) -> list[str]:
    """Returns the output of a script in processes that run at the same time, which must all succeed."""
    with contextlib.ExitStack() as stack:
        processes = []
        for environment in environments:
            processes.append(stack.enter_context(subprocess.Popen(
                [sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, **environment})))
            stack.callback(processes[-1].kill)
        outputs = []
        for process in processes:
            stdout, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
            outputs.append(stdout)
        return outputs
