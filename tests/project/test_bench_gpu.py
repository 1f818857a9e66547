"""The suite for GPUs, in its dry run, and what it says before it has seen one."""

import ast
import json
import math
import os
import subprocess
import sys

import pytest

from tests.support import project_files

FOLDER = project_files.ROOT / "benchmarks"


def python(*arguments, timeout=100, **variables):
    """Runs Python in the folder of the benchmarks, on one CPU device unless `variables` say otherwise."""
    dropped = ("XLA_FLAGS", "TF_CONFIG", "JAX_TRACEBACK_FILTERING")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = os.pathsep.join([str(FOLDER), str(project_files.ROOT)])
    return subprocess.run([sys.executable, *arguments], cwd=FOLDER, env=environment | {"PYTHONPATH": paths} | variables,
                          text=True, capture_output=True, timeout=timeout)


def evaluated(code, **variables):
    """Returns the literal that a piece of code prints."""
    done = python("-c", code, **variables)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive  # minutes
@pytest.mark.slow
@pytest.mark.processes
def test_the_dry_run_writes_the_numbers_of_every_stage(tmp_path):
    done = python("bench_gpu.py", "--tiny", "--out", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    page, stored = (tmp_path / "GPU.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert "Not yet run on a GPU." in page and "**no**" not in page and "**Failed:**" not in page
    checks = stored["correct"]["checks"]
    assert len(checks) > 10 and all(check["passed"] for check in checks)
    for name, entry in stored.items():
        assert f"## {name}\n" in page and entry["tiny"] and entry["machine"]["devices"] == 1
        assert entry["figures"] or name == "correct", name
        for figure in entry["figures"]:
            assert math.isfinite(figure["value"]) and figure["unit"], figure
            assert figure["value"] > 0 or "gap" in figure["what"] or figure["what"] == "idle for each step", figure
        for ratio in entry["ratios"]:
            assert 0 < ratio["median"] < math.inf, ratio
    found = {(name, figure["who"], figure["what"]) for name, entry in stored.items() for figure in entry["figures"]}
    for name, whats in {"images": ("rate", "first step", "device busy"), "transformer": ("rate", "longest gap"),
                        "small": ("step",)}.items():
        assert {(name, who, what) for who in ("fit", "by hand") for what in whats} <= found


@pytest.mark.slow
def test_without_a_gpu_only_a_dry_run_is_possible(tmp_path):
    done = python("bench_gpu.py", "small", "--out", str(tmp_path), JAX_PLATFORMS="cpu")
    assert done.returncode == 2 and "pass --tiny for a dry run" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_stage_that_fails_is_named_and_the_others_go_on(tmp_path):
    code = ("import bench_gpu, sys; from gpu.stages import STAGES; "
            "sys.argv = ['bench_gpu.py', '--tiny', '--out', sys.argv[1], 'graphs', 'first']; "
            "STAGES['first'] = STAGES['graphs']; print(bench_gpu.main())")
    done = python("-c", code, str(tmp_path), BENCHMARK_PLATFORM="cpu")
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert "Failed: first." in done.stdout and done.stdout.splitlines()[-1] == "1"
    assert stored["graphs"]["error"] is None and "KeyError: 'first'" in stored["first"]["error"]


@pytest.mark.slow
def test_every_stage_ends_in_less_than_8_minutes_and_all_in_less_than_25():
    limits, total = evaluated("from gpu.stages import STAGES, TOTAL_SECS; "
                              "print([stage.limit_secs for stage in STAGES.values()], TOTAL_SECS, sep=', ')")
    assert max(limits) < 8 * 60 and total < 25 * 60


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_stopped_and_leaves_what_it_had(tmp_path):
    code = ("import bench_gpu, sys, dataclasses; from gpu.stages import STAGES; "
            "STAGES['graphs'] = dataclasses.replace(STAGES['graphs'], limit_secs=2.0); "
            "sys.argv = ['bench_gpu.py', '--tiny', '--out', sys.argv[1], 'graphs']; print(bench_gpu.main())")
    done = python("-c", code, str(tmp_path))
    entry = json.loads((tmp_path / "gpu.json").read_text())["graphs"]
    assert entry["error"] == "stopped after its limit of 2 s", done.stderr
    assert done.stdout.splitlines()[-1] == "1" and "**Failed:** stopped" in (tmp_path / "GPU.md").read_text()


@pytest.mark.slow
def test_the_page_says_that_nothing_has_run_on_a_gpu_until_it_has():
    committed, results = (FOLDER / "GPU.md").read_text(), FOLDER / "gpu.json"
    if not results.exists():
        assert "Not yet run on a GPU." in committed
    rendered = python("-c", "import json, pathlib; from gpu.page import render; path = pathlib.Path('gpu.json'); "
                      "print(render(json.loads(path.read_text()) if path.exists() else {}), end='')")
    assert rendered.stdout == committed, rendered.stderr


def test_gaps_are_those_of_the_middle_of_a_trace():
    gaps = evaluated("from gpu.trace import gaps; "
                     "print(list(gaps([(0, 1), (0.5, 1.5), (3, 5), (6, 8)], steps=4)))")
    assert gaps == [50.0, 1e6, 1e6, 1.0]  # from 2 to 6 s: a second of the first gap, and the second gap


EVENTS = """
from types import SimpleNamespace as Made
from gpu.trace import work_of
def plane(name, lines):
    return Made(name=name, lines=[Made(name=line, events=events) for line, events in lines.items()])
def event(name, start, length):
    return Made(name=name, start_ns=start * 1e9, duration_ns=length * 1e9)
host = plane("/host:CPU", {"tf_XLA": [event("fusion", 0, 9), event("end: fusion", 9, 9)]})
gpu = plane("/device:GPU:0", {"Stream #1": [event("kernel", 1, 2)], "Steps": [event("0", 0, 9)]})
print(work_of(Made(planes=[host, gpu]), "gpu"), work_of(Made(planes=[host]), "cpu"), sep=", ")
try:
    work_of(Made(planes=[host]), "gpu")
except ValueError:
    pass
else:
    print("A host's work is no GPU's.")
"""


def test_the_work_of_a_gpu_is_what_its_streams_ran():
    assert evaluated(EVENTS) == ([(1.0, 3.0)], [(0.0, 9.0)])


@pytest.mark.slow
def test_the_model_of_gpt2_small_needs_the_operations_that_are_known_for_it():
    weights, peaks = evaluated(
        "from gpu.workloads import GPT2_SMALL; from gpu.peaks import peak_flops; print(GPT2_SMALL.flops_per_token, "
        "[peak_flops(kind) for kind in ('NVIDIA H200', 'NVIDIA H100 80GB HBM3', 'NVIDIA A100-SXM4-80GB', "
        "'NVIDIA L4', 'cpu', '')], sep=', ')")
    # Biases and LayerNorms apart, six for each of the 124 M weights, and attention.
    assert weights == pytest.approx(6 * 124_439_808 + 12 * 12 * 768 * 1024, rel=0.01)
    assert peaks == [989.4e12, 989.4e12, 312e12, 121e12, None, None]


AS_ON_A_GPU = """
import pathlib, sys
from gpu import measured
from gpu.context import Context
from gpu.page import render
from gpu.results import Results
from workers import Machine
def measure(name, case, machine, rounds, most_epochs, outcome, traced):
    for who, secs in (("fit", 2.0), ("by hand", 1.0)):
        outcome.rounds[who] = [{"seconds": secs, "steps": 10, "rows": 160, "peak_megabytes": 5.0}] * rounds
        outcome.starts[who] = 30.0
    outcome.notes["Keras on JAX"] = "skipped: keras is not installed"
    outcome.traces["fit"] = {"busy_percent": 99.0, "idle_us_per_step": 1.0, "longest_us": 2.0,
                             "long_gaps_per_step": 0.9}
    outcome.traces["by hand"] = {"untraced": "no rights"}
measured.measure = measure
results = Results(pathlib.Path(sys.argv[1], "results.json"))
machine = Machine("gpu", 2, "Two GPUs.")
measured.measure_case(Context(machine, "NVIDIA H100 80GB HBM3", False, results), "gpt2", 3)
described = {"platform": "gpu", "text": machine.text, "commit": "abc"}
entry = {"machine": described, "tiny": False, "seconds": 3.0, "error": None}
pathlib.Path(sys.argv[1], "GPU.md").write_text(render({"transformer": entry | results.content}))
"""


@pytest.mark.slow
def test_what_a_gpu_gives_becomes_rates_utilisation_and_checks(tmp_path):
    done = python("-c", AS_ON_A_GPU, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "GPU.md").read_text()
    figures = {(figure["who"], figure["what"]): (figure["value"], figure["unit"]) for figure in found["figures"]}
    assert figures["by hand", "rate"] == (160 * 1024, "tokens/s")
    assert figures["by hand", "model FLOP utilisation"][0] == pytest.approx(
        100 * 160 * 1024 * 8.54e8 / (2 * 989.4e12), rel=1e-2)
    assert figures["fit", "peak memory of a GPU"] == (5.0, "MB")
    assert figures["fit", "first step"] == (30.0 - 31 * 0.2, "s")  # the start has two epochs of 16 steps
    assert [(ratio["theirs"], ratio["median"], ratio["met"]) for ratio in found["ratios"]] == [("by hand", 2.0, False)]
    assert [(check["name"].rpartition(": ")[2], check["passed"]) for check in found["checks"]] == [
        ("no stall for each step", False), ("traced", False)]
    assert "| **no** |" in page and "not yet run" not in page.lower() and "keras is not installed" in page


FULL_SIZES = """
import jax, jax.numpy as jnp, numpy as np
from loops_hand import train_step
from gpu.cases import all_cases
from gpu.loops import new_model
sizes = {}
for name in ("mobilenet_v2", "resnet50", "gpt2"):
    workload = all_cases()[name].workload
    module, tx = workload.module(jnp.bfloat16), workload.optimizer()
    shape = (2, 1024) if workload.transformer else (2, 224, 224, 3)
    x = jax.ShapeDtypeStruct(shape, jnp.int32 if workload.transformer else jnp.float32)
    y = jax.ShapeDtypeStruct(shape if workload.transformer else (2,), jnp.int32)
    def init(x):
        model_state = dict(module.init(jax.random.key(0), x))
        params = model_state.pop("params")
        return params, model_state, tx.init(params)
    state = jax.eval_shape(init, x)
    after, logs = jax.eval_shape(train_step(module, tx, workload.has_accuracy), state, x, y)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state)
    assert new_model(workload).state_shapes(np.zeros(x.shape, x.dtype)).params is not None
    sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
print(sizes)
"""


@pytest.mark.exhaustive
def test_the_models_in_full_size_can_be_traced():
    assert evaluated(FULL_SIZES) == {"mobilenet_v2": 3_504_872, "resnet50": 25_583_592, "gpt2": 124_439_808}


SAME_NUMBERS = """
import jax, jax.numpy as jnp, numpy as np
from loops_hand import train_step
from gpu.cases import all_cases
from gpu.loops import new_model
apart = []
for name in ("resnet50", "gpt2"):
    workload = all_cases()["tiny " + name].workload
    (x, y), size, model = workload.data(), workload.batch_size(), new_model(workload)
    model.build(x[:1])
    tx = workload.optimizer()
    params, model_state = jax.tree.map(jnp.copy, (model.state.params, dict(model.state.model_state)))
    state, losses = (params, model_state, tx.init(params)), []
    step = jax.jit(train_step(workload.module(jnp.bfloat16), tx))
    for start in range(0, len(x), size):
        state, (loss, _) = step(state, x[start:start + size], y[start:start + size])
        losses.append(float(loss))
    history = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history
    moved = [np.abs(np.asarray(new) - np.asarray(old)).max() for new, old in zip(
        jax.tree.leaves(state[:2]), jax.tree.leaves((model.state.params, dict(model.state.model_state))))]
    apart.append((float(abs(history["loss"][0] / np.mean(losses) - 1)), float(max(moved))))
print(apart)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_loop_by_hand_trains_as_fit_does():
    for loss, weights in evaluated(SAME_NUMBERS):
        assert loss < 1e-3 and weights < 1e-2
