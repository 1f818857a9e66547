"""`python -m trainer plan SCRIPT --topology 8xh100`: the memory and time of a script's first `fit` on GPUs.

Owns this command. The script runs on this machine's CPU until it calls `fit`, which plans instead of training and ends
it.

Exit codes: 0 if the step fits, 1 if it does not, or the exit code of the script; 2 for rejected arguments.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

DOES_NOT_FIT, REFUSED = 1, 2
_ALTERNATIVES: dict[str, bool | str] = {"auto": "auto", "always": True, "never": False}
DESCRIPTION = """\
Runs a script until it calls `fit`, and prints what that training would take on GPUs that need not be there. The
strategy of its model is made again over them. JAX sees as many simulated CPU devices as the topology has GPUs."""


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command to its parser."""
    plan.add_argument("script", metavar="SCRIPT", help="a script that makes a model and calls `fit`")
    plan.add_argument("--topology", required=True, metavar="GPUS",
                      help="such as 8xh100, or 2x8xh200 for two hosts with eight each")
    plan.add_argument("--alternatives", choices=_ALTERNATIVES, default="auto",
                      help="whether to compile changes, too (default: if the step does not fit)")
    plan.add_argument("--memory-fraction", type=float, default=0.75, metavar="F",
                      help="the part of a GPU's memory that JAX takes (default: 0.75)")
    plan.add_argument("--json", action="store_true", help="print JSON")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace, of_script: Sequence[str]) -> int:
    """Plans the first `fit` of a script, and returns the exit code, unless the script ends this process."""
    if not os.path.exists(options.script):
        parser.error(f"there is no script {options.script!r} in {os.getcwd()!r}.")
    _prepare(parser, options.topology)
    _plan_instead_of_fit(options)
    sys.argv = [options.script, *(of_script[1:] if of_script[:1] == ["--"] else of_script)]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))  # as with `python SCRIPT`
    runpy.run_path(options.script, run_name="__main__")
    print(f"{options.script} has ended, and has not called `fit`: there is nothing to plan.", file=sys.stderr)
    return REFUSED


def _prepare(parser: argparse.ArgumentParser, topology: str) -> None:
    """Sets environment variables for JAX's start: devices for the script's strategy, and no search for GPUs."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from trainer.distribute.placement.described import EXTRA, Topology, is_plugin_installed

    try:
        devices = Topology.of(topology).size
    except ValueError as error:
        parser.error(str(error))
    if not is_plugin_installed():
        parser.error("JAX's CUDA plugin, which compiles for GPUs, is not installed: "
                     f"pip install 'trainer-jax[{EXTRA}]'")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()


def _plan_instead_of_fit(options: argparse.Namespace) -> None:
    from trainer.engine.model.model import Model
    from trainer.tools.plan import plan

    signature = inspect.signature(Model.fit)

    def fit(model: Model, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(model, *args, **kwargs).arguments
        sample, batch_size = _sample(given)
        planned = plan(
            model, sample, options.topology, batch_size=batch_size,
            alternatives=_ALTERNATIVES[options.alternatives], memory_fraction=options.memory_fraction,
            verbose=not options.json)
        if options.json:
            print(json.dumps(planned.to_dict(), indent=2))
        sys.exit(0 if planned.fits else DOES_NOT_FIT)

    Model.fit = fit  # type: ignore[method-assign, assignment]  # in this process, which runs nothing else


def _sample(given: dict[str, Any]) -> tuple[Any, int | None]:
    """Returns the data of `fit` as a single value, and the rows per batch of arrays; None for other data."""
    x, y, sample_weight = (given.get(name) for name in ("x", "y", "sample_weight"))
    if y is None and not hasattr(x, "shape"):
        return x, given.get("batch_size")
    import jax

    rows, steps = jax.tree.leaves(x)[0].shape[0], given.get("steps_per_epoch")
    batch_size = given.get("batch_size") or (-(-rows // steps) if steps else min(32, rows))
    return (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight), batch_size

