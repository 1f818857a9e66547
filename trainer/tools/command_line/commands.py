"""The commands of `python -m trainer`: their names, their arguments and their modules.

Owns the command line as a whole. Each command has its own module, which is imported when it runs: `launch` starts
without JAX.

Exit codes: 0 for success; 1 if a step does not fit, something is wrong or a file is damaged; 2 for rejected arguments.
`launch` has the exit codes of `trainer-launch`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trainer.core.errors import page_url
from trainer.tools.command_line import plan
from trainer.tools.command_line.plan import REFUSED

_DOCTOR = """\
Checks what trainings need: versions, devices, memory, the cluster that the environment describes, the cache of compiled
programs, optional packages. It joins no cluster, and JAX takes no more of a GPU's memory than a small product needs."""
_INSPECT = """\
Prints what a file or folder holds: weights, a training state, the checkpoints of a run, an exported model. All bytes
are compared with the checksums that were saved with them. The model's code is not needed, and no code is run."""
_EXPLAIN = """\
Prints the entry of the page "Errors and exit codes" that a message of the trainer ends with, such as `monitor`, or the
meaning of an exit code, such as 75. It needs no network. (`strategy.explain(model)` is another thing: what a device
holds.)"""
_TIMEOUT_SECS = 3.0
_FOREIGN_COMMANDS = {"train": "fit", "run": "fit", "eval": "evaluate", "test": "evaluate", "validate": "evaluate",
                     "infer": "predict", "serve": "export"}
_CONFIGURED = {
    "fit": "trains the model of a configuration, or continues its run",
    "evaluate": "the loss and the metrics of a run's model",
    "predict": "writes the outputs of a run's model to a file",
    "export": "exports a run's model, for programs without its code",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of `python -m trainer` in this process, and returns the exit code.

    Args:
      arguments: the command and its arguments, such as `["fit", "--config", "run.yaml"]`; this process's by default.

    Raises:
      SystemExit: if an argument is rejected, with exit code 2. Errors of the command itself are raised as they are.

    Example:
      >>> from trainer.tools import main
      >>> main(["inspect", "nowhere.safetensors"])
      2
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["launch"]:  # the rest are arguments of the script
        from trainer.launch import main as launch

        return launch(arguments[1:])
    if arguments and arguments[0] in _CONFIGURED:  # the rest are keys of the configuration
        try:
            from trainer.tools.command_line import configured
        except ModuleNotFoundError as error:
            if error.name != "jsonargparse":
                raise
            print(f"`python -m trainer {arguments[0]}` needs jsonargparse: pip install 'trainer-jax[cli]'",
                  file=sys.stderr)
            return REFUSED
        return configured.main(arguments[0], arguments[1:])
    parser, parsers = _parsers()
    if arguments and arguments[0].endswith(".py"):
        script = arguments[0]
        parser.error(f"{script!r} is no command. Run a script by `python {script}`, or in several processes by "
                     f"`python -m trainer launch --workers N {script}`.")
    if arguments and arguments[0] in _FOREIGN_COMMANDS:
        parser.error(f"there is no command {arguments[0]!r}. Give `{_FOREIGN_COMMANDS[arguments[0]]}`.")
    options, others = parser.parse_known_args(arguments)
    if options.command == "plan":
        return plan.run(parsers["plan"], options, others)
    if others:
        parsers[options.command].error(f"unrecognized arguments: {' '.join(others)}")
    if options.command == "explain":
        from trainer.tools.command_line import explain

        return explain.run(options.code)
    if options.command == "doctor":
        from trainer.tools.command_line import doctor

        return doctor.run(options.timeout, options.json)
    from trainer.tools.command_line import inspection

    return inspection.run(options.path, options.json)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(prog="python -m trainer", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in _CONFIGURED.items():
        commands.add_parser(name, help=f"{text}; see {page_url('configuration')}", add_help=False)
    planner = commands.add_parser(
        "plan", help="what a training would take on GPUs", description=plan.DESCRIPTION, allow_abbrev=False,
        usage="%(prog)s SCRIPT --topology GPUS [options] [--] [ARGUMENT ...]",
        epilog="All other arguments, and all after --, are the script's.")
    plan.add_arguments(planner)
    doctor = commands.add_parser("doctor", help="whether this machine, or this process of a cluster, can train",
                                 description=_DOCTOR, allow_abbrev=False)
    doctor.add_argument("--timeout", type=float, default=_TIMEOUT_SECS, metavar="SECS",
                        help=f"how long to wait for another machine's answer (default: {_TIMEOUT_SECS:g})")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    inspect = commands.add_parser("inspect", help="what a file of weights, a checkpoint or an export holds, and "
                                  "whether it is whole", description=_INSPECT, allow_abbrev=False)
    inspect.add_argument("path", metavar="PATH", help="the file or folder")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    explain = commands.add_parser("explain", help="what a message of the trainer means, and its solution",
                                  description=_EXPLAIN, allow_abbrev=False)
    explain.add_argument("code", metavar="CODE", nargs="?", help="the code; all codes are listed without")
    commands.add_parser("launch", help="runs a script as a cluster on this machine; the same as trainer-launch",
                        add_help=False)
    return parser, {"plan": planner, "doctor": doctor, "inspect": inspect, "explain": explain}
