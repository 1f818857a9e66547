"""The programs that `fit`, `evaluate` and `predict` would run on GPUs, compiled for them without one."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import trainer
from tests.support import gpu_programs, project_files
from tests.support.gpu_programs import Case
from trainer import distribute
from trainer.distribute.placement.described import EXTRA, is_plugin_installed
from trainer.tools.plan.program_contents import peak_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_plugin_installed(), reason="JAX's CUDA plugin is not installed: "
                       f"pip install 'trainer-jax[{EXTRA}]'"),
]

TOPOLOGIES = ("1xh100", "2xh100", "8xh100", "2x8xh100")
SHARDED = Case(strategy="fully_sharded", model="lm")
TRAINED = [Case(topology=topology) for topology in TOPOLOGIES] + [
    Case(model="cnn"), Case(model="lm", topology="2x8xh100"), SHARDED]
PHASES = [*TRAINED, *(Case(kind=kind, topology=topology) for kind in ("test", "predict")
                      for topology in ("1xh100", "8xh100", "2x8xh100"))]


def name(case):
    return "-".join([case.model, case.strategy, case.topology, case.kind])


def parameter_bytes(case):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.compiled().state.params))


@pytest.mark.parametrize("case", PHASES, ids=name)
def test_nothing_is_sent_to_the_host(case):
    gpu_programs.assert_no_host_transfers(case.compiled().program)


@pytest.mark.parametrize("case", PHASES, ids=name)
def test_the_only_loop_is_that_over_fused_steps(case):
    gpu_programs.assert_no_loops_inside_of_steps(
        case.compiled().program, case.compiled().phase.steps_per_execution)


class Block(nn.Module):
    """A block with inner activations that are four times as large as its outputs."""

    @nn.compact
    def __call__(self, x):
        h = x
        for _ in range(3):
            h = nn.gelu(nn.Dense(1024)(h))
        return x + nn.Dense(256)(h)


def test_a_policy_that_keeps_products_plans_less_memory_than_all_and_more_than_nothing():
    def temporary_bytes(remat):
        model = trainer.Model(trainer.Sequential([Block() for _ in range(6)]).module)
        model.compile("sgd", "mse", remat=remat)
        x = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
        plan = trainer.plan(model, (x, x), "1xh100", alternatives=False, verbose=False)
        return plan.memory.temporary

    nothing, dots, everything = (temporary_bytes(remat) for remat in (True, "dots_saveable", False))
    assert nothing < 0.5 * dots and dots < 0.7 * everything


@pytest.mark.parametrize("case", [Case(), Case(kind="test")], ids=name)
def test_fused_steps_are_a_loop_of_known_length(case):
    assert case.compiled().phase.steps_per_execution > 1
    gpu_programs.assert_known_trip_counts(case.compiled().program)


@pytest.mark.parametrize("case", TRAINED, ids=name)
def test_the_state_keeps_its_buffers(case):
    gpu_programs.assert_state_is_donated(case.compiled())


@pytest.mark.parametrize(("case", "most"), [
    (Case(topology="2xh100"), 1), (Case(), 1), (Case(topology="2x8xh100"), 1),
    (Case(model="lm", topology="2x8xh100"), 2), (SHARDED, 12)], ids=lambda value: (
        name(value) if isinstance(value, Case) else str(value)))
def test_gradients_are_reduced_in_few_collectives_beside_work(case, most):
    gpu_programs.assert_gradients_are_reduced(case, parameter_bytes(case), most)


def test_fully_sharded_layers_are_gathered_where_they_are_used():
    case = Case(strategy="fully_sharded", model="deep")
    compiled, layers, activations = case.compiled(), 24, 24 * 16 * 1024 * 4 * 20  # some 20 arrays in each layer
    temporary, params = compiled.compiled.memory_analysis().temp_size_in_bytes, parameter_bytes(case)
    assert temporary < params / 8 + 3 * params / layers + activations < params
    gathers = [each for each in gpu_programs.collectives_of(compiled.program, 8) if each.kind == "all-gather"]
    assert len(gathers) > 3 * layers  # of six arrays in each, both ways; XLA joins some


def test_one_gpu_communicates_nothing():
    assert gpu_programs.collectives_of(Case(topology="1xh100").compiled().program, 1) == []


@pytest.mark.parametrize(("model", "precision", "dtypes"), [
    ("mlp", None, {"f32"}), ("mlp", "mixed_bfloat16", {"bf16"}), ("cnn", "mixed_bfloat16", {"bf16"}),
    ("lm", "mixed_bfloat16", {"bf16"}),
])
def test_products_are_computed_in_the_dtype_that_was_asked_for(model, precision, dtypes):
    case = Case(model=model, options=(("precision", precision),))
    assert gpu_programs.product_dtypes(case.compiled().program) == dtypes


@pytest.mark.parametrize("case", [Case(), Case(topology="1xh100"), SHARDED], ids=name)
def test_what_fit_runs_takes_the_memory_that_a_plan_says(case):
    peak = peak_bytes(gpu_programs.compiled_as_fit_does(case))
    strategy = gpu_programs.STRATEGIES[case.strategy]()
    plan = strategy.plan(case.new_model(), case.batch, case.topology, verbose=False)
    assert plan.memory.step == pytest.approx(peak, rel=0.1)


def test_a_model_that_is_larger_than_this_machine_is_planned_without_its_weights():
    model = trainer.Model(nn.Dense(200_000, use_bias=False))  # 160 GB of weights
    model.compile("adam", "mse", steps_per_execution=1)
    batch = jax.ShapeDtypeStruct((16, 200_000), jnp.float32), jax.ShapeDtypeStruct((16, 200_000), jnp.float32)
    plan = distribute.FullyShardedStrategy().plan(model, batch, "8xh100", verbose=False, alternatives=False)
    assert plan.memory.parameters == 200_000**2 * 4 // 8 and plan.memory.optimizer_state >= 2 * plan.memory.parameters
    assert not plan.fits and not model.built


def test_alternatives_are_compiled_and_listed():
    model = Case(model="lm").new_model()
    plan = distribute.MirroredStrategy().plan(
        model, gpu_programs.Case(model="lm").batch, "2xh100", verbose=False, alternatives=True)
    found = {each.change: each for each in plan.alternatives}
    assert not [each for each in plan.alternatives if each.problem]
    assert found["microbatches=8"].peak_bytes < plan.memory.peak
    assert found["FullyShardedStrategy()"].peak_bytes < plan.memory.peak


def test_described_devices_need_no_topology(capsys):
    strategy = distribute.ModelParallelStrategy(
        {"replica": 4, "model": 2}, distribute.described_devices("8xh100"), {"Dense_0/kernel": (None, "model")})
    case = Case()
    plan = strategy.plan(case.new_model(), case.batch)
    assert (plan.topology, plan.num_replicas, plan.num_devices) == ("8xh100", 4, 8)
    assert {row.devices for row in plan.collectives} >= {4}
    assert str(plan) in capsys.readouterr().out


def test_a_script_is_planned_from_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import sys
import numpy as np
from flax import linen as nn
import trainer

strategy = trainer.distribute.MirroredStrategy()
with strategy.scope():
    model = trainer.Model(nn.Dense(3))
    model.compile("adam", "mse")
model.fit(np.ones((640, 4), np.float32), np.ones((640, 3), np.float32),
          batch_size=int(sys.argv[1]) * strategy.num_replicas_in_sync)
raise AssertionError("not reached")
""")
    command = [sys.executable, "-m", "trainer", "plan", str(script), "--topology", "2x4xh100", "--json", "8"]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=project_files.ROOT, env=env)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["topology"], plan["batch_rows"], plan["num_replicas"], plan["fits"]) == ("2x4xh100", 64, 8, True)
