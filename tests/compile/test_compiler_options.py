"""What XLA is told beside a program, and what it makes of that on GPUs that are only described."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import described_gpus
from trainer.compile.compiler_options import compiler_options
from trainer.step import compiled_phase

GPUS = [SimpleNamespace(platform="gpu")] * 2
needs_plugin = pytest.mark.skipif(not described_gpus.IS_INSTALLED, reason="needs the CUDA plugin, but no GPU")


def test_programs_for_cpus_and_tpus_get_no_options():
    assert compiler_options(jax.devices("cpu"), deterministic=True) == {}
    assert compiler_options([SimpleNamespace(platform="tpu")], deterministic=True) == {}


def test_a_deterministic_program_for_gpus_has_no_kernel_that_adds_in_another_order():
    assert "xla_gpu_exclude_nondeterministic_ops" not in compiler_options(GPUS)
    assert compiler_options(GPUS, deterministic=True)["xla_gpu_exclude_nondeterministic_ops"] is True


def test_xla_knows_the_options():
    options = compiler_options(GPUS, deterministic=True)
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(jnp.sin).lower(1.0).compile(compiler_options={**options, "xla_gpu_no_such_option": True})


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


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.Embed(1000, 16)(x).mean(axis=1))


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_an_embedding_is_sorted_in_a_deterministic_step_for_an_h100(deterministic):
    model = trainer.Model(Tokens())
    model.compile("sgd", "mse", deterministic=deterministic)
    strategy = trainer.distribute.Strategy(described_gpus.described_gpus(1))
    batch = np.zeros((16, 8), np.int32), np.zeros((16, 1), np.float32)
    text = described_gpus.compiled_train_step(model, strategy, batch).as_text()
    assert len(re.findall(r"= .* scatter\(", text)) == 1
    assert bool(re.search(r"= .* sort\(", text)) == deterministic


@needs_plugin
@pytest.mark.slow
def test_a_step_with_counting_metrics_has_no_loop_and_no_scatter_on_an_h100():
    model = trainer.Sequential([nn.Dense(1), nn.sigmoid])
    model.compile("sgd", "binary_crossentropy", weighted_metrics=[
        trainer.metrics.AUC(), trainer.metrics.Precision(), trainer.metrics.BinaryIoU()])
    strategy = trainer.distribute.Strategy(described_gpus.described_gpus(1))
    batch = np.zeros((64, 8), np.float32), np.zeros((64, 1), np.float32), np.ones(64, np.float32)
    text = described_gpus.compiled_train_step(model, strategy, batch).as_text()
    assert not re.search(r"= .* (while|scatter)\(", text)
