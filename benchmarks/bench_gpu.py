"""Measures on the GPUs there are, in stages: `python benchmarks/bench_gpu.py [STAGE ...] [OPTIONS]`.

Each stage is a process with a time limit, and a failed stage stops no other. Its results replace its older results in
`gpu.json`, from which `GPU.md` is written. The exit code is 1 if a stage failed, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from gpu.page import render
from gpu.stages import STAGES, TOTAL_SECS

FOLDER = pathlib.Path(__file__).parent
GRACE_SECS = 20.0  # for a stage to end its workers
_PROBE = """
import json, jax, measuring
devices = jax.devices()
print(json.dumps({"platform": jax.default_backend(), "devices": len(devices), "device_kind": devices[0].device_kind,
                  "jax": jax.__version__, "text": measuring.environment()}))
"""


def environment(tiny: bool) -> dict[str, str]:
    """Returns the environment of all processes: the benchmarks and the trainer can be imported from anywhere."""
    paths = [str(FOLDER), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A stage's process and those that it starts share the memory of the GPUs.
    changed = {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
               "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if tiny:  # compiles in less time
        changed["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    return os.environ | changed


def probe(tiny: bool) -> dict[str, Any]:
    """Returns the description of the machine, from a process of its own: the parent of others must hold no device."""
    done = subprocess.run([sys.executable, "-c", _PROBE], cwd=FOLDER, env=environment(tiny), check=True,
                          stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"commit": _commit() or "unknown"}


def _commit() -> str:
    """Returns the commit's short name, of BENCH_COMMIT if it is set; "" where there is no git or no repository."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True,
                              text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def run_stage(
    name: str, machine: dict[str, Any], tiny: bool, rounds: int, limit_secs: float, without: Sequence[str],
) -> dict[str, Any]:
    """Runs a stage in a process of its own; returns its entry for the JSON file."""
    changed = environment(tiny)
    if name == "correct" and machine["platform"] == "cpu":  # strategies need several devices
        changed["XLA_FLAGS"] = f"{changed.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
    with tempfile.TemporaryDirectory() as folder:
        path, start, error = pathlib.Path(folder, "results.json"), time.monotonic(), None
        command = [sys.executable, "-m", "gpu.stage", name, str(path), json.dumps(machine), str(rounds),
                   json.dumps(without), *(["--tiny"] if tiny else [])]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, cwd=FOLDER, env=changed, stderr=errors)
            try:
                process.wait(limit_secs)
            except subprocess.TimeoutExpired:
                error = f"stopped after its limit of {limit_secs:.0f} s"
                process.terminate()
                try:
                    process.wait(GRACE_SECS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            except BaseException:
                process.terminate()
                raise
            errors.seek(0)
            written = errors.read()
        if process.returncode:
            print(written[-4000:], file=sys.stderr)
        if process.returncode and not error:
            error = written.strip().splitlines()[-1] if written.strip() else f"exit status {process.returncode}"
        empty: dict[str, Any] = {"figures": [], "ratios": [], "checks": [], "notes": []}
        found = json.loads(path.read_text()) if path.exists() else empty
    return {"machine": machine, "date": str(datetime.date.today()), "tiny": tiny, "error": error,
            "seconds": time.monotonic() - start, **found}


def main() -> int:
    """Runs the stages, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"one of {', '.join(STAGES)}; all by default")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a dry run, on a CPU too")
    parser.add_argument("--out", type=pathlib.Path, help="where GPU.md and gpu.json go; benchmarks/ by default, or "
                        "of a dry run a new folder")
    parser.add_argument("--rounds", type=int, default=0, help="of each case; by default a case's own number")
    parser.add_argument("--limit", type=float, default=TOTAL_SECS, help="seconds of a stage at most")
    parser.add_argument("--without", action="append", default=[], metavar="CONTESTANT", help="is left out")
    options = parser.parse_args()
    if unknown := sorted(set(options.stages) - set(STAGES)):
        parser.error(f"unknown stages: {', '.join(unknown)}; known are {', '.join(STAGES)}")
    machine = probe(options.tiny)
    if machine["platform"] != "gpu" and not options.tiny:
        print("No GPU is visible to JAX; pass --tiny for a dry run.", file=sys.stderr)
        return 2
    out = options.out or (pathlib.Path(tempfile.mkdtemp(prefix="bench-gpu-")) if options.tiny else FOLDER)
    out.mkdir(parents=True, exist_ok=True)
    stored = json.loads((out / "gpu.json").read_text()) if (out / "gpu.json").exists() else {}
    begin, failed = time.monotonic(), []
    for name in options.stages or STAGES:
        print(f"== {name}", flush=True)
        limit_secs = min(STAGES[name].limit_secs, options.limit, TOTAL_SECS - (time.monotonic() - begin))
        stored[name] = run_stage(name, machine, options.tiny, options.rounds, max(1.0, limit_secs),
                                 options.without)
        (out / "gpu.json").write_text(json.dumps(stored, indent=1) + "\n")
        (out / "GPU.md").write_text(render(stored))
        error = stored[name]["error"]
        failed += [name] if error else []
        print(f"== {name}: {f'FAILED, {error}' if error else 'done'} in {stored[name]['seconds']:.0f} s\n", flush=True)
    print(f"Written to {out}." + (f" Failed: {', '.join(failed)}." if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
