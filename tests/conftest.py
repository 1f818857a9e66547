"""Eight simulated devices for every test, and a check that no test leaves threads or environment variables behind."""

from __future__ import annotations

import atexit
import collections
import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import zlib
from importlib import metadata

import hypothesis
import pytest

# Read once, when JAX's backend starts: must stand before anything imports jax. CPU unless asked otherwise, so that
# the suite means the same on every machine.
# Most of the suite's time is compiling tiny programs, hence the low optimization level.
_FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # half the time to compile; later versions have no such flag
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")  # a failing test shows the trainer's frames
# All processes of a run of the suite, and the processes that tests start, share their compiled programs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="trainer-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

# Here and not in a test, because it sets environment variables of its own.
import jax  # noqa: E402
import numpy as np  # noqa: E402

import trainer  # noqa: E402

# No test asserts a time: on a busy machine, an example may take long, and so may drawing it.
hypothesis.settings.register_profile("any machine", deadline=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")

THREAD_GRACE_SECS = 30.0
CASES_FOR_ONE = 5  # no usual length of an axis of cases


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run the part K of N parts of the tests, from 0, as CI does in turn")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    """Selects cases (`sampled`, `slow`, `every_case` in pyproject.toml) and tests (`--part`)."""
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        test, is_slow = item.nodeid.partition("[")[0], bool(marks & {"slow", "processes"})
        is_divided = "every_case" not in marks if is_slow else "sampled" in marks
        if marks & {"smoke", "exhaustive"} or not is_divided:
            continue
        sampled = item.get_closest_marker("sampled")
        # All cases would take `make test-rest` half an hour more.
        if counts[test, is_slow] % (sampled.args[0] if sampled and sampled.args else CASES_FOR_ONE):
            item.add_marker(pytest.mark.slow if "every_case" in marks else pytest.mark.exhaustive)
        counts[test, is_slow] += 1
    if part := config.getoption("part"):
        number, parts = map(int, part.split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.partition("[")[0].encode()) % parts == number]


def pytest_collection_finish():
    """Collects garbage seldom: JAX and the cases themselves are so many objects that it took a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_terminal_summary(terminalreporter):
    comparison = sys.modules.get("tests.support.keras_comparison")
    if comparison is not None and comparison.COUNTS:
        terminalreporter.write_line(f"Compared with Keras: {dict(comparison.COUNTS)}.")


@pytest.fixture(scope="session", autouse=True)
def temporary_folders(tmp_path_factory):
    """Makes the folders of `tempfile` beside those of `tmp_path`, because pytest removes them after a few runs."""
    with pytest.MonkeyPatch.context() as patch:
        # Not TMPDIR, from which Ray makes paths of sockets, which must be short.
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tempfile")))
        yield


@pytest.fixture
def devices():
    """The eight simulated CPU devices."""
    return jax.devices("cpu")


def leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Returns the names of threads started since `before` that a test should have ended.

    Those are the trainer's own, and any that would keep the process from exiting. A thread that is just ending gets
    a moment to do so.
    """
    began = time.monotonic()
    while True:
        leaked = [thread.name for thread in threading.enumerate()
                  if thread not in before and (not thread.daemon or thread.name.startswith("trainer"))]
        waited = time.monotonic() - began
        if not leaked or waited > THREAD_GRACE_SECS:
            return leaked
        # Some end with an object of a cycle, such as the traceback of an error. To search all objects takes long, and
        # those of a test are mostly young.
        gc.collect(2 if waited > 1.0 else 1)
        time.sleep(0.01 if waited < 1.0 else 0.1)


@pytest.fixture(autouse=True)
def no_leaked_threads():
    before = set(threading.enumerate())
    yield
    leaked = leaked_threads(before)
    assert not leaked, f"threads left running: {leaked}"


@pytest.fixture
def seeds_stay():
    """Restores the states of random numbers after a test that sets the seeds of the process."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    trainer.utils.set_random_seed(0)
    random.setstate(state)
    np.random.set_state(numpy_state)  # noqa: NPY002


@pytest.fixture(autouse=True)
def no_leaked_environment_variables():
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    # pytest's own names the running test; OpenMP of scikit-learn, Keras and Ray set theirs at the first import.
    foreign = "PYTEST_CURRENT_TEST", "KMP_", "TF_FORCE_GPU_ALLOW_GROWTH", "RAY_CLIENT_MODE"
    names = {name for name in before.keys() | after.keys() if not name.startswith(foreign)}
    changed = {name for name in names if before.get(name) != after.get(name)}
    # Nothing else is written: XLA's threads may read the environment meanwhile, and glibc's setenv() is not safe then.
    # To set all variables again after each test crashed a worker once in many runs.
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"environment variables left changed: {sorted(changed)}"
