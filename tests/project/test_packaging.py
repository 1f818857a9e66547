"""What an installed copy promises: its version, its types, its packages, and an import that brings few others."""

import importlib.metadata
import importlib.resources
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest

import trainer
from tests.support import pages, project_files, use_of_extras

PYPROJECT = tomllib.loads((project_files.ROOT / "pyproject.toml").read_text())
HEAVY = ("flax.nnx", "rich", "grain", "orbax", "matplotlib", "jinja2", "sklearn", "tensorflow", "torch",
         "tensorboardX", "ray", "keras", "IPython")
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


def modules_after(statement: str) -> set[str]:
    return set(json.loads(run_python(f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))")))


def heavy_modules_after(statement: str) -> set[str]:
    return modules_after(statement) & set(HEAVY)


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
def test_importing_the_trainer_brings_no_package_that_jax_flax_and_optax_do_not():
    # `make bench` measures the time that it takes.
    ours, baseline = ({name.partition(".")[0] for name in modules_after(statement)}
                      for statement in (EVERYTHING, BASELINE))
    assert ours - baseline - sys.stdlib_module_names - {"__mp_main__"} == {"trainer"}


# --- what is published -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The wheel and the sdist, as `python -m build` makes them, of a copy of the project: no folder is left in it."""
    pytest.importorskip("build")
    root = tmp_path_factory.mktemp("published")
    ignored = shutil.ignore_patterns(".*", "_build", "generated", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(project_files.ROOT, root / "project", symlinks=True, ignore=ignored)
    done = subprocess.run([sys.executable, "-m", "build", "--outdir", str(root / "dist"), str(root / "project")],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    wheel, = (root / "dist").glob("*.whl")
    sdist, = (root / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture
def environment(published, tmp_path):
    """The interpreter of a new environment with the wheel, whose dependencies are those of this one."""
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment" / "bin" / "python"
    home, = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    options = ("-qq", "--no-deps", "--no-index", "--no-compile", "--target", str(home))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(published[0])], check=True, timeout=100)
    # Paths of a .pth file come last, and .pth files behind them, as of an editable install, are not read.
    (home / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python, home


def run_in(environment, source, folder, check=True):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    return subprocess.run([str(environment[0]), "-c", source], cwd=folder, env=clean, capture_output=True, text=True,
                          timeout=200, check=check)


@pytest.mark.exhaustive  # with a build, which takes seconds and asks a package index for setuptools
@pytest.mark.slow
def test_the_wheel_and_the_sdist_are_whole_and_have_nothing_else(published):
    wheel, sdist = published
    for tool in ("twine check --strict", "check_wheel_contents"):
        name, *options = tool.split()
        pytest.importorskip(name)
        files = [str(wheel), str(sdist)] if name == "twine" else [str(wheel)]
        command = [sys.executable, "-m", name, *options, *files]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(wheel) as file:
        in_wheel = {name for name in file.namelist() if not name.split("/")[0].endswith(".dist-info")}
    modules = {f"{name.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py"
               for name, path in project_files.modules().items()}
    others = {"trainer/py.typed", "trainer/tools/report/page.html.jinja", "trainer/tools/command_line/errors.md"}
    others |= (stubs := {f"{name}i" for name in modules if (project_files.ROOT / f"{name}i").is_file()})
    assert stubs and in_wheel == modules | others
    with tarfile.open(sdist) as file:
        in_sdist = {name.partition("/")[2] for name in file.getnames()}
    assert modules | others | {"README.md", "LICENSE", "pyproject.toml"} <= in_sdist


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_installed_wheel_passes_the_quick_start(environment, tmp_path):
    block, = pages.blocks("README.md")
    checks = ("import trainer, pathlib, importlib.metadata as metadata\n"
              "print(trainer.__file__, metadata.version('trainer-jax'), logits.shape)\n")
    done = run_in(environment, f"{block}\n{checks}", tmp_path)
    assert done.stdout.splitlines()[-1] == (
        f"{environment[1] / 'trainer' / '__init__.py'} {PYPROJECT['project']['version']} (200, 3)")
    assert (environment[1] / "bin" / "trainer-launch").is_file()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.processes
def test_the_wheel_and_what_it_needs_come_from_an_index(published, tmp_path):
    # A clean environment: nothing in it but what pip takes from the index that this machine has.
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    done = subprocess.run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check",
                           str(published[0])], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    block, = pages.blocks("README.md")
    assert "accuracy" in run_in((python,), block, tmp_path).stdout
    done = subprocess.run([str(python), "-m", "pip", "check"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


# --- the other package of this name ----------------------------------------------------------------------------------


def test_files_of_another_distribution_are_found(tmp_path):
    # As `pip install trainer` leaves them beside ours: those of names that we do not have.
    package = pathlib.Path(trainer.__file__).parent
    (tmp_path / "trainer" / "core" / "calls").mkdir(parents=True)
    for name in ("__init__.py", "__init__.pyi", "core/__init__.py", "core/calls/__init__.py",
                 "core/calls/callers.py", "core/calls/public_names.py", "core/errors.py", "core/received_text.py"):
        shutil.copy(package / name, tmp_path / "trainer" / name)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", "import trainer; print(trainer.__file__)"]
    alone = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert alone.stdout.strip() == str(tmp_path / "trainer" / "__init__.py"), alone.stderr
    (tmp_path / "trainer" / "trainer_utils.py").touch()
    both = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert "ImportError: Two distributions have installed a package `trainer`" in both.stderr
    assert "pip uninstall trainer coqui-tts-trainer trainer-jax" in both.stderr


def test_the_foreign_file_is_none_of_ours():
    assert "trainer.trainer_utils" not in project_files.modules()


# --- extras ----------------------------------------------------------------------------------------------------------


def test_errors_of_what_is_missing_name_an_extra_that_exists():
    extras = PYPROJECT["project"]["optional-dependencies"]
    named = set()
    for path in project_files.modules().values():
        source = path.read_text()
        named |= set(re.findall(r"pip install 'trainer-jax\[([\w-]+)\]'", source))
        named |= set(re.findall(r'missing_package\("\w+", "\w+", "([\w-]+)"\)', source))
    assert {"images", "ray", "tensorboard"} <= named <= set(extras)


def test_the_weekly_job_uses_each_extra_of_a_user():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(pages.read(".github/workflows/extras.yml"))["jobs"]
    for_hardware, for_work = {"cuda12", "cuda13", "gpu-programs"}, {"bench", "docs", "dev"}
    extras = set(PYPROJECT["project"]["optional-dependencies"]) - for_hardware - for_work
    assert set(jobs["newest"]["strategy"]["matrix"]["extra"]) == extras == set(use_of_extras.USES)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("extra", "package"), [("images", "h5py"), ("orbax", "orbax"), ("plot", "matplotlib"),
                                                ("remote", "fsspec")])
def test_the_use_of_an_extra_works_here(extra, package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    use_of_extras.USES[extra]()
