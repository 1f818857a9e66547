"""What an installed copy promises: its version, its types, its packages, and an import that is not dear."""

import importlib.metadata
import importlib.resources
import json
import os
import statistics
import subprocess
import sys
import tomllib

import pytest

import trainer
from tests.support import project_files

PYPROJECT = tomllib.loads((project_files.ROOT / "pyproject.toml").read_text())
HEAVY = ("flax.nnx", "rich", "grain", "orbax", "matplotlib", "sklearn", "tensorflow", "torch", "tensorboardX", "ray",
         "keras", "IPython")
BASELINE = "import jax, flax, optax"  # what any program around Flax imports anyway
# Each name is imported when it is first used; tests alone use `testing`.
EVERYTHING = "import trainer\n[getattr(trainer, name) for name in trainer.__all__ if name != 'testing']"
FIT_OF_A_LINEN_MODEL = """
import numpy as np, trainer
from flax import linen as nn
model = trainer.Model(nn.Dense(1))
model.compile(optimizer="sgd", loss="mse")
model.fit(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"), batch_size=2, verbose=0)
assert int(model.state.step) == 2
"""


def run_python(source: str, **variables: str) -> str:
    # With bytecode cached, as any installed package has it; jax's is from its installation on.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True,
                          env={**environment, **variables})
    return done.stdout


def cpu_secs_of(statement: str) -> float:
    # Without the garbage collector: of two programs that allocate nearly the same, only one may be long enough for a
    # full collection, whose 50 ms say nothing about what it imports.
    return float(run_python(f"import gc, time\ngc.disable()\n{statement}\nprint(time.process_time())"))


def heavy_modules_after(statement: str) -> set[str]:
    return set(json.loads(run_python(f"import json, sys\n{statement}\n"
                                     f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))")))


def test_the_version_is_the_distributions():
    assert trainer.__version__ == importlib.metadata.version("trainer-jax") == PYPROJECT["project"]["version"]


def test_type_checkers_find_the_marker():
    assert importlib.resources.files("trainer").joinpath("py.typed").is_file()


def test_every_package_is_installed():
    # Found by setuptools as folders with an `__init__.py`, those behind the symbolic links included.
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["trainer", "trainer.*"]
    folders = {name.rpartition(".")[0] for name, path in project_files.modules().items() if path.name != "__init__.py"}
    root = project_files.ROOT
    assert [name for name in folders if not (root / name.replace(".", "/") / "__init__.py").is_file()] == []


def test_models_and_callbacks_are_part_of_the_package():
    from trainer import callbacks, models

    assert (models.__name__, callbacks.__name__) == ("trainer.models", "trainer.callbacks")


def test_every_name_is_there_and_an_unknown_one_is_an_error():
    import trainer

    assert set(trainer.__all__) <= set(dir(trainer))
    assert all(getattr(trainer, name) is not None for name in [*trainer.__all__, "__version__"])
    with pytest.raises(AttributeError, match="module 'trainer' has no attribute 'Modell'"):
        trainer.Modell  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'trainer.distribute' has no attribute 'Sidecar'"):
        trainer.distribute.Sidecar  # noqa: B018


@pytest.mark.slow
def test_importing_the_trainer_brings_no_heavy_dependency():
    assert heavy_modules_after(EVERYTHING) <= heavy_modules_after(BASELINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sklearn", "flax.nnx"])
def test_a_heavy_dependency_would_be_seen(name):
    assert name in heavy_modules_after(f"import {name}")


@pytest.mark.slow
def test_training_a_linen_model_does_not_import_nnx():
    assert "flax.nnx" not in heavy_modules_after("from flax import linen")
    assert "flax.nnx" not in heavy_modules_after(FIT_OF_A_LINEN_MODEL)


@pytest.mark.slow
def test_running_a_function_on_replicas_without_nnx_objects_does_not_import_nnx():
    assert "flax.nnx" not in heavy_modules_after(
        "import jax.numpy as jnp, trainer\n"
        "strategy = trainer.distribute.OneDeviceStrategy()\n"
        "assert strategy.experimental_local_results(strategy.run(lambda x: x + 1, args=(jnp.ones(()),)))[0] == 2")


@pytest.mark.slow
def test_importing_the_trainer_does_not_start_jax():
    # A platform that does not exist: whatever needs a device fails.
    run_python(EVERYTHING, JAX_PLATFORMS="nowhere")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_python("import jax.numpy as jnp\njnp.zeros(())", JAX_PLATFORMS="nowhere")
    assert "nowhere" in failed.value.stderr


@pytest.mark.slow
def test_importing_the_trainer_costs_little_more_than_jax_flax_and_optax():
    # CPU time, interleaved, the medians: the machine's speed changes between processes. A busy one needs more rounds.
    # The bar is 1.1, which `make bench` measures; here it is wider, as a test must not fail by chance.
    cpu_secs_of(EVERYTHING)
    baseline, ours = [], []
    for _ in range(15):
        baseline.append(cpu_secs_of(BASELINE))
        ours.append(cpu_secs_of(EVERYTHING))
        if len(ours) >= 3 and statistics.median(ours) <= 1.2 * statistics.median(baseline):
            break
    else:
        pytest.fail(f"{statistics.median(ours):.2f} s against {statistics.median(baseline):.2f} s")
