"""What an installed copy promises: its version, its types, its packages, and an import that is not dear."""

import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
import tomllib

import trainer
from tests import project_files

PYPROJECT = tomllib.loads((project_files.ROOT / "pyproject.toml").read_text())
HEAVY = ("rich", "grain", "orbax", "matplotlib", "sklearn", "tensorflow", "torch", "tensorboardX", "ray", "keras")
# What any program around Flax imports anyway; the trainer accepts modules of both of Flax's interfaces.
BASELINE = "import jax, flax, optax, flax.linen, flax.nnx"


def run_python(source: str) -> str:
    # With bytecode cached, as any installed package has it; jax's is from its installation on.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True,
                          env=environment)
    return done.stdout


def cpu_secs_of(statement: str) -> float:
    return float(run_python(f"import time\n{statement}\nprint(time.process_time())"))


def heavy_modules_after(statement: str) -> set[str]:
    return set(json.loads(run_python(f"import json, sys\n{statement}\n"
                                     f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))")))


def test_the_version_is_the_distributions():
    assert trainer.__version__ == importlib.metadata.version("trainer-jax") == PYPROJECT["project"]["version"]


def test_type_checkers_find_the_marker():
    assert importlib.resources.files("trainer").joinpath("py.typed").is_file()


def test_every_package_is_installed():
    packages = {name for name, path in project_files.modules().items() if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages


def test_models_and_callbacks_are_part_of_the_package():
    from trainer import callbacks, models

    assert (models.__name__, callbacks.__name__) == ("trainer.models", "trainer.callbacks")


def test_importing_the_trainer_brings_no_heavy_dependency():
    assert heavy_modules_after("import trainer") <= heavy_modules_after(BASELINE)


def test_a_heavy_dependency_would_be_seen():
    assert "sklearn" in heavy_modules_after("import sklearn")


def test_importing_the_trainer_costs_little_more_than_jax_flax_and_optax():
    # CPU time, interleaved, the least of each: what else the machine does at the time only ever adds to it. A busy
    # machine needs more rounds to show the least.
    cpu_secs_of("import trainer")
    baseline, ours = [], []
    for _ in range(15):
        baseline.append(cpu_secs_of(BASELINE))
        ours.append(cpu_secs_of("import trainer"))
        if len(ours) >= 3 and min(ours) <= 1.15 * min(baseline):
            break
    assert min(ours) <= 1.15 * min(baseline), f"{min(ours):.2f} s against {min(baseline):.2f} s"
