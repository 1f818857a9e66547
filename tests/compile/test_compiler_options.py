"""What XLA is told beside a program."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute
from trainer.core.compile.compiler_options import compiler_options, options_of_one_run
from trainer.distribute.replica import replicated_state
from trainer.engine.step import compiled_phase

GPUS = [SimpleNamespace(platform="gpu")] * 2


def test_programs_for_cpus_and_tpus_get_no_options():
    assert compiler_options(jax.devices("cpu"), deterministic=True) == {}
    assert compiler_options([SimpleNamespace(platform="tpu")], deterministic=True) == {}


@pytest.mark.slow
def test_an_initialisation_on_cpus_compiles_faster_to_the_same_bits(monkeypatch):
    device = jax.devices("cpu")[0]
    assert options_of_one_run(device) == {}, "the tests' own XLA_FLAGS have a level"
    monkeypatch.delenv("XLA_FLAGS")
    assert options_of_one_run(GPUS[0]) == {}
    module, x = trainer.models.MLP(num_classes=10, hidden=(32, 32)), jnp.ones((8, 16))
    lowered = jax.jit(module.init).lower(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, *(
        lowered.compile(compiler_options=each)(jax.random.key(0), x)
        for each in ({"xla_backend_optimization_level": 3}, options_of_one_run(device))))


def test_a_deterministic_program_for_gpus_has_no_kernel_that_adds_in_another_order():
    assert compiler_options(GPUS[:1], deterministic=False) == {}
    assert compiler_options(GPUS[:1], deterministic=True) == {
        "xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_deterministic_ops": True}


def test_collectives_of_several_gpus_are_scheduled_beside_other_work_unless_that_is_switched_off():
    assert compiler_options(GPUS) == {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert compiler_options(GPUS[:1]) == {}
    assert not any(compiler_options(GPUS, overlap=False).values())


@pytest.mark.parametrize("make", [
    lambda options: distribute.MirroredStrategy(["cpu:0", "cpu:1"], distribute.NcclAllReduce(options=options)),
    lambda options: distribute.FullyShardedStrategy(["cpu:0", "cpu:1"], communication_options=options),
    lambda options: distribute.ModelParallelStrategy(
        {"model": 2}, ["cpu:0", "cpu:1"], communication_options=options),
    lambda options: distribute.MultiWorkerMirroredStrategy(options),
])
def test_a_strategy_gives_the_compiler_its_communication_options(monkeypatch, make):
    strategy = make(distribute.CommunicationOptions(bytes_per_pack=2**20, overlap=False))
    assert strategy.compiler_options() == {}  # on CPUs
    monkeypatch.setattr(replicated_state, "compiler_options", lambda devices, **given: given)
    expected = {"deterministic": False, "overlap": False, "bytes_per_pack": 2**20}
    assert strategy.compiler_options().items() >= expected.items()


def test_a_function_of_the_users_own_is_compiled_with_the_options_of_its_strategy(monkeypatch):
    strategy = distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    monkeypatch.setattr(strategy, "compiler_options", lambda: {"xla_gpu_no_such_option": True})
    with pytest.raises(Exception, match="No such compile option: 'xla_gpu_no_such_option'"):
        strategy.run(lambda: jnp.ones(()))


@pytest.mark.parametrize("overlap", [True, False])
def test_xla_knows_the_options(overlap):
    options = compiler_options(GPUS, deterministic=True, overlap=overlap, bytes_per_pack=2**20)
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(jnp.sin).lower(1.0).compile(compiler_options={**options, "xla_gpu_no_such_option": True})


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_steps_of_a_model_are_compiled_with_what_compile_says(monkeypatch, deterministic):
    compile_lowered, given = compiled_phase.compile_lowered, []

    def noting(lowered, options):
        given.append(options)
        return compile_lowered(lowered)

    model = trainer.Sequential([nn.Dense(2)])
    monkeypatch.setattr(compiled_phase, "compile_lowered", noting)
    monkeypatch.setattr(type(model.strategy), "compiler_options", lambda self, deterministic: {"of": deterministic})
    model.compile("sgd", "mse", deterministic=deterministic)
    x = np.ones((8, 2), np.float32)
    model.fit(x, x, verbose=0)
    model.evaluate(x, x, verbose=0)
    model.predict(x, verbose=0)
    assert len(given) == 3 and all(options == {"of": deterministic} for options in given)


def test_a_deterministic_step_must_be_compiled():
    model = trainer.Sequential([nn.Dense(2)])
    for eager in ({"run_eagerly": True}, {"jit_compile": False}):
        with pytest.raises(ValueError, match=r"`deterministic=True` is about how steps are compiled.*Give one of them"):
            model.compile("sgd", "mse", deterministic=True, **eager)
    with pytest.raises(TypeError, match="deterministic"):
        model.compile("sgd", "mse", deterministic="yes")
